// Moving, hovering, and the start. The names that are used here without a declaration are those of draw.js.

// ---------------------------------------------------------------- moving

function show(from, to) {
  const size = Math.min(Math.max(to - from, END / 1e7), END);
  view.from = Math.min(Math.max(from, 0), END - size);
  view.to = view.from + size;
  redraw();
}

function zoom(factor, at = (view.from + view.to) / 2) {
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

const pan = (part) => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));

for (const canvas of [chart, memory]) {
  canvas.addEventListener("wheel", (event) => {
    if (event.offsetX < LEFT) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan(((event.deltaX || event.deltaY) * unit) / width());
    } else zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * unit * 0.002))), toTime(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("dblclick", () => show(0, END));

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.offsetX < LEFT) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, from: view.from, to: view.to };
    if (event.shiftKey) span = [toTime(event.offsetX), toTime(event.offsetX)];
    else canvas.classList.add("moving");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && span) {
      span[1] = toTime(Math.max(LEFT, event.offsetX));
      redraw();
    } else if (drag) {
      const shift = ((event.offsetX - drag.x) / width()) * (drag.to - drag.from);
      show(drag.from - shift, drag.to - shift);
    }
    point(canvas, event);
  });
  const drop = () => {
    if (span && Math.abs(toX(span[1]) - toX(span[0])) > 4) show(Math.min(...span), Math.max(...span));
    drag = span = null;
    canvas.classList.remove("moving");
    redraw();
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);
  canvas.addEventListener("pointerleave", () => {
    hover = cursor = null;
    find("tip").hidden = true;
    redraw();
  });
}

find("in").onclick = () => zoom(1 / 1.6);
find("out").onclick = () => zoom(1.6);
find("all").onclick = () => show(0, END);
window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {
    "+": () => zoom(1 / 1.6), "=": () => zoom(1 / 1.6), "-": () => zoom(1.6), "0": () => show(0, END),
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
  };
  if (moves[event.key]) {
    moves[event.key]();
    event.preventDefault();
  }
});
window.addEventListener("resize", redraw);

// ---------------------------------------------------------------- hovering

function stepAt(x, y) {
  const row = rows.find((each) => y >= each.y && y < each.y + each.height + each.foot + 1);
  if (!row || x < LEFT) return null;
  const { lane } = row;
  let best = null, near = 4;
  if (!row.foot || y >= row.y + row.height) {
    const first = lower(row.short, (i) => lane.start[i], toTime(x - 400));
    for (let k = first; k < row.short.length && lane.start[row.short[k]] <= toTime(x + 8); k++) {
      const away = Math.abs(shortPlace(row, k).x + TICK / 2 - x);
      if (away < near) [best, near] = [row.short[k], away];
    }
  }
  if (best === null) {
    const k = lower(row.long, (i) => lane.end[i], toTime(x));
    if (k < row.long.length && lane.start[row.long[k]] <= toTime(x)) best = row.long[k];
  }
  return best === null ? null : { row, i: best };
}

function lines(step) {
  const { lane, name } = step.row, i = step.i;
  const size = lane.end[i] - lane.start[i];
  const kind = data.kinds[lane.kind[i]];
  const when = slots
    ? size ? `slots ${round(lane.start[i])} to ${round(lane.end[i])}` : `at slot ${round(lane.start[i])}`
    : `${timeText(lane.start[i], END)} to ${timeText(lane.end[i], END)}, takes ${timeText(size)}`;
  const what = { forward: "writes", backward: "writes", weight: "writes", update: "writes", other: "writes",
    free: "frees" }[kind.name] || "moves";
  const micro = lane.micro[i] < 0 ? "" : `, micro-batch ${lane.micro[i]}`;
  const all = [
    ["head", `${lane.title}, ${name}: ${kind.title}${micro}`],
    ["text", `${String(i).padStart(4, "0")}  ${clip(lane.text[i], 700)}`],
    ["", when + (lane.kind[i] === WAIT ? "" : `; ${what} ${bytesText(lane.bytes[i])}`)],
    ["", `live after it: ${bytesText(lane.live[i])}`],
  ];
  if (lane.cause[i]) all.push(["", `cause: ${data.strings[lane.cause[i]]}`]);
  if (lane.source[i]) all.push(["", `source: ${data.strings[lane.source[i]]}`]);
  return all;
}

function memoryLines(time, y) {
  const at = Math.floor((y - AXIS) / BAND), lane = data.lanes[at];
  if (!lane) return null;
  const order = lane.live.map((_, i) => i);
  const i = lower(order, (k) => (lane.issued[k] <= time ? 0 : 1), 1) - 1;
  const all = [["head", `${lane.title}, ${slots ? "slot" : "at"} ${timeText(time, END)}`],
    ["", `${bytesText(i < 0 ? lane.held : lane.live[i])} live`]];
  if (i >= 0) all.push(["text", `since ${String(i).padStart(4, "0")}  ${clip(lane.text[i], 300)}`]);
  return all;
}

function point(canvas, event) {
  const { offsetX: x, offsetY: y } = event;
  cursor = x >= LEFT ? toTime(x) : null;
  hover = canvas === chart ? stepAt(x, y) : null;
  let text = hover && lines(hover);
  if (canvas === memory && cursor !== null) text = memoryLines(cursor, y);
  const tip = find("tip");
  tip.hidden = !text;
  if (text) {
    tip.replaceChildren(...text.map(([kind, words]) => {
      const div = document.createElement("div");
      div.className = kind;
      div.textContent = words;
      return div;
    }));
    const { offsetWidth: wide, offsetHeight: tall } = tip;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - wide - 8))}px`;
    const below = event.clientY + 16;
    tip.style.top = `${below + tall < window.innerHeight ? below : Math.max(4, event.clientY - tall - 12)}px`;
  }
  redraw();
}

// ---------------------------------------------------------------- the start

const time = slots ? `${round(data.end)} slots (one per run, all else takes no time)` : timeText(data.end);
find("title").textContent = `Schedule on ${data.mesh}: ${time}`;
document.title = find("title").textContent;
const used = new Set(data.lanes.flatMap((lane) => [...new Set(lane.kind)]));
for (const style of [...data.kinds.filter((_, at) => used.has(at)), data.idle]) {
  const item = document.createElement("li"), sample = document.createElement("canvas");
  [sample.width, sample.height] = [30, 16];
  const pen = sample.getContext("2d");
  box(pen, style, 0, 0, 30, 16);
  pen.strokeStyle = "#888888";
  pen.strokeRect(0.5, 0.5, 29, 15);
  item.append(sample, style.title);
  find("legend").append(item);
}
redraw();
