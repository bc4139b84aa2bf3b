// What is drawn: rows of steps in time, and memory. page.html has the data and explore.js the rest.

const data = JSON.parse(document.getElementById("schedule").textContent);
const slots = data.unit === "slots";
const RIGHT = 16, AXIS = 24; // pixels: margin, numbers of the time axis
const NAMES = 16, COMPUTE = 26, FOOT = 6, COMM = 15, GAP = 10, BAND = 46; // pixels: heights
const TICK = 3; // pixels that a step of no length is wide
const LETTERS = 6.6; // pixels of a letter at 11px
const LEFT = Math.max(190, 16 + LETTERS * Math.max(0, ...data.lanes.map((lane) => lane.title.length))); // of names
const END = data.end || 1;
const find = (id) => document.getElementById(id);

// ---------------------------------------------------------------- rows

// Each row: its y, its height, and the steps in it by start. Steps of no length lie on top.
const rows = [];
const FREE = data.kinds.findIndex((kind) => kind.name === "free");
const WAIT = data.kinds.findIndex((kind) => kind.name === "wait");
const byName = data.lanes.some((lane) => lane.groups.length) ? NAMES : 0;
let bottom = AXIS;
for (const lane of data.lanes) {
  lane.top = bottom;
  bottom += byName;
  lane.rows.forEach((name, at) => {
    const row = { lane, name, at, y: bottom, height: at ? COMM : COMPUTE, foot: at ? 0 : FOOT, long: [], short: [], nth: [], next: [] };
    bottom += row.height + row.foot + 1;
    rows.push(row);
    lane.start.forEach((start, i) => {
      if (lane.row[i] === at) (lane.end[i] > start ? row.long : row.short).push(i);
    });
    for (const list of [row.long, row.short]) list.sort((a, b) => lane.start[a] - lane.start[b] || a - b);
    // Marks of one moment lie side by side: the how-manieth each is, and the moment of the next ones.
    row.short.forEach((i, k) => {
      const same = k && lane.start[row.short[k - 1]] === lane.start[i];
      row.nth.push(same ? row.nth[k - 1] + 1 : 0);
    });
    for (let k = row.short.length - 1; k >= 0; k--) {
      row.next[k] = row.nth[k + 1] ? row.next[k + 1] : k + 1 < row.short.length ? lane.start[row.short[k + 1]] : 2 * END;
    }
  });
  bottom += GAP;
}

// The first of `list`, sorted by `key`, whose key is not below `value`.
function lower(list, key, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (key(list[mid]) < value) low = mid + 1;
    else high = mid;
  }
  return low;
}

// ---------------------------------------------------------------- text

function bytesText(count) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size * 0.9995) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

const round = (value) => String(Number(value.toPrecision(5)));

// `span` is what is seen: it says the unit.
function timeText(at, span = at) {
  if (slots) return round(at);
  const [unit, size] = span >= 1 ? ["s", 1] : span >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6];
  return `${round(at / size)} ${unit}`;
}

const percent = (part) => `${Math.round(100 * part)}%`;
const clip = (text, most) => (text.length > most ? text.slice(0, most - 1) + "\u2026" : text);

// ---------------------------------------------------------------- drawing

const view = { from: 0, to: END };
const chart = find("chart"), memory = find("memory");
let hover = null; // {row, i}
let cursor = null; // a time
let span = null; // [time, time] that is being chosen

const width = () => chart.clientWidth - LEFT - RIGHT;
const toX = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * width();
const toTime = (x) => view.from + ((x - LEFT) / width()) * (view.to - view.from);

function tile(style) {
  const canvas = document.createElement("canvas");
  const side = (canvas.width = canvas.height = 8);
  const pen = canvas.getContext("2d");
  pen.fillStyle = style.colour;
  pen.fillRect(0, 0, side, side);
  pen.strokeStyle = pen.fillStyle = "#333333";
  pen.lineWidth = 0.8;
  pen.beginPath();
  const kinds = new Set(style.hatch);
  for (const shift of [-side, 0, side]) {
    if (kinds.has("/") || kinds.has("x")) pen.moveTo(shift - 1, side + 1), pen.lineTo(shift + side + 1, -1);
    if (kinds.has("\\") || kinds.has("x")) pen.moveTo(shift - 1, -1), pen.lineTo(shift + side + 1, side + 1);
  }
  pen.stroke();
  if (kinds.has(".")) for (const [x, y] of [[1, 1], [5, 5]]) pen.fillRect(x, y, 1.3, 1.3);
  return canvas;
}

for (const style of data.kinds) style.tile = style.hatch ? tile(style) : null;
const paint = (pen, style) => (style.tile ? pen.createPattern(style.tile, "repeat") : style.colour);

function begin(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const wide = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(wide * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}

function axis(pen, height) {
  const seen = view.to - view.from;
  const rough = seen / Math.max(width() / 90, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough);
  if (slots) step = Math.max(1, step);
  pen.textAlign = "center";
  for (let k = Math.ceil(view.from / step); k * step <= view.to + 1e-9 * seen; k++) {
    const x = toX(k * step);
    pen.fillStyle = "#e4e4e4";
    pen.fillRect(x, AXIS - 6, 1, height - AXIS + 6);
    pen.fillStyle = "#444444";
    pen.fillText(timeText(k * step, seen), x, 9);
  }
}

function inside(pen, height, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width(), height);
  pen.clip();
  draw();
  pen.restore();
}

function box(pen, style, x, y, wide, height) {
  pen.fillStyle = paint(pen, style);
  pen.fillRect(x, y, wide, height);
  if (wide > 3) {
    pen.strokeStyle = style.hatch ? "#555555" : "#ffffff";
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, wide - 1, height - 1);
  }
}

function names(lane, i) {
  const letter = data.kinds[lane.kind[i]].letter;
  const micro = lane.micro[i] < 0 ? "" : String(lane.micro[i]);
  return [data.strings[lane.label[i]], letter + micro, micro];
}

function drawLong(pen, row) {
  const { lane } = row;
  let drawn = -1;
  for (let k = lower(row.long, (i) => lane.end[i], view.from); k < row.long.length; k++) {
    const i = row.long[k];
    if (lane.start[i] > view.to) break;
    const x = Math.max(toX(lane.start[i]), LEFT - 4), to = Math.min(toX(lane.end[i]), chart.clientWidth + 4);
    if (to - drawn < 0.5) continue;
    drawn = to;
    const style = data.kinds[lane.kind[i]];
    box(pen, style, x, row.y, Math.max(to - x, 0.5), row.height);
    if (lane.kind[i] === WAIT) continue;
    const seen = [Math.max(x, LEFT), Math.min(to, LEFT + width())];
    const name = names(lane, i).find((text) => text && text.length * LETTERS <= seen[1] - seen[0] - 4);
    if (!name) continue;
    const middle = (seen[0] + seen[1]) / 2;
    if (style.hatch) {
      pen.fillStyle = style.colour;
      const wide = pen.measureText(name).width + 4;
      pen.fillRect(middle - wide / 2, row.y + row.height / 2 - 6, wide, 12);
    }
    pen.fillStyle = style.ink;
    pen.fillText(name, middle, row.y + row.height / 2 + 0.5);
  }
}

// Waits and frees of no length are small marks at the foot of the compute row.
function shortPlace(row, k) {
  const { lane } = row, i = row.short[k];
  const [y, height] = row.foot ? [row.y + row.height + 1, row.foot - 1] : [row.y, row.height];
  return { x: toX(lane.start[i]) + row.nth[k] * (TICK + 1), y, height };
}

function drawShort(pen, row) {
  const { lane } = row;
  const slack = (view.to - view.from) / Math.max(width(), 1);
  let drawn = -1;
  for (let k = lower(row.short, (i) => lane.start[i], view.from - 200 * slack); k < row.short.length; k++) {
    const i = row.short[k];
    if (lane.start[i] > view.to) break;
    const { x, y, height } = shortPlace(row, k);
    if (Math.abs(x - drawn) < 1 || (row.nth[k] && x + TICK > toX(row.next[k]))) continue;
    drawn = x;
    pen.fillStyle = "#ffffff";
    pen.fillRect(x - 0.5, y, TICK + 1, height);
    const style = data.kinds[lane.kind[i]];
    pen.fillStyle = lane.kind[i] === WAIT ? "#777777" : style.colour;
    pen.fillRect(x, y, TICK, height);
  }
}

function drawGroups(pen, lane) {
  pen.fillStyle = "#333333";
  for (const [name, start, end] of lane.groups) {
    if (end < view.from || start > view.to) continue;
    const x = Math.max(toX(start), LEFT), to = Math.min(toX(end), LEFT + width());
    if (to - x < 1) continue;
    pen.fillRect(x + 1, lane.top + NAMES - 4, to - x - 2, 1.2);
    if (name.length * LETTERS <= to - x) pen.fillText(name, (x + to) / 2, lane.top + NAMES - 10);
  }
}

function line(pen, height) {
  if (cursor === null || cursor < view.from || cursor > view.to) return;
  pen.fillStyle = "#d55e00";
  pen.fillRect(toX(cursor), AXIS - 6, 1, height - AXIS + 6);
}

function drawChart() {
  const pen = begin(chart, bottom);
  for (const row of rows) {
    pen.fillStyle = data.idle.colour;
    pen.fillRect(LEFT, row.y, width(), row.height + row.foot);
  }
  axis(pen, bottom);
  pen.textAlign = "right";
  for (const row of rows) {
    pen.fillStyle = row.at ? "#777777" : "#222222";
    pen.fillText(row.at ? clip(row.name, 28) : row.lane.title, LEFT - 8, row.y + row.height / 2 - (row.at ? 0 : 6));
    if (!row.at) {
      pen.fillStyle = "#777777";
      pen.fillText(`idle ${percent(1 - row.lane.busy / END)}`, LEFT - 8, row.y + row.height / 2 + 7);
    }
  }
  inside(pen, bottom, () => {
    pen.textAlign = "center";
    data.lanes.forEach((lane) => drawGroups(pen, lane));
    for (const row of rows) {
      drawLong(pen, row);
      drawShort(pen, row);
    }
    if (hover) {
      const { row, i } = hover;
      const x = toX(row.lane.start[i]), wide = Math.max(toX(row.lane.end[i]) - x, TICK);
      pen.strokeStyle = "#000000";
      pen.lineWidth = 2;
      pen.strokeRect(x, row.y, wide, row.height);
    }
    if (span) {
      pen.fillStyle = "#0072b233";
      pen.fillRect(toX(Math.min(...span)), 0, Math.abs(toX(span[1]) - toX(span[0])), bottom);
    }
    line(pen, bottom);
  });
}

const most = Math.max(1, ...data.lanes.map((lane) => lane.live.reduce((a, b) => Math.max(a, b), lane.held)));

function drawMemory() {
  const height = AXIS + BAND * data.lanes.length + 4;
  const pen = begin(memory, height);
  axis(pen, height);
  data.lanes.forEach((lane, at) => {
    const floor = AXIS + BAND * (at + 1) - 4, scale = (BAND - 8) / most;
    const peak = lane.live.reduce((a, b) => Math.max(a, b), lane.held);
    pen.textAlign = "right";
    pen.fillStyle = "#222222";
    pen.fillText(`rank ${lane.rank}`, LEFT - 8, floor - BAND / 2 - 1);
    pen.fillStyle = "#777777";
    pen.fillText(`peak ${bytesText(peak)}`, LEFT - 8, floor - BAND / 2 + 12);
    inside(pen, height, () => {
      const path = new Path2D();
      let before = lane.held, x = LEFT;
      path.moveTo(LEFT, floor - before * scale);
      // Many steps may fall on one pixel: of those, the least and the most are kept.
      let least = before, top = before;
      const flush = (to) => {
        path.lineTo(x, floor - top * scale);
        path.lineTo(x, floor - least * scale);
        path.lineTo(x, floor - before * scale);
        path.lineTo(to, floor - before * scale);
        least = top = before;
      };
      for (let i = 0; i < lane.live.length && lane.issued[i] <= view.to; i++) {
        const next = Math.max(LEFT, toX(lane.issued[i]));
        if (next - x >= 0.5) {
          flush(next);
          x = next;
        }
        before = lane.live[i];
        if (x > LEFT || lane.issued[i] >= view.from) {
          least = Math.min(least, before);
          top = Math.max(top, before);
        } else least = top = before;
      }
      flush(Math.max(x, Math.min(toX(END), LEFT + width())));
      const area = new Path2D(path);
      area.lineTo(Math.min(toX(END), LEFT + width()), floor);
      area.lineTo(LEFT, floor);
      pen.fillStyle = "#56b4e9";
      pen.fill(area);
      pen.strokeStyle = "#0072b2";
      pen.lineWidth = 1;
      pen.stroke(path);
      pen.fillStyle = "#cccccc";
      pen.fillRect(LEFT, floor, width(), 1);
    });
  });
  inside(pen, height, () => line(pen, height));
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    drawChart();
    drawMemory();
  });
}
