"""fparallel: the step of `benchmarks/training.py` under fp.jit, on the ranks of this job or on one alone."""

from collections.abc import Callable

import fparallel as fp
from benchmarks import training
from benchmarks.harness import Peer
from benchmarks.instructions import InstructionTimes
from fparallel import P

peer = Peer(mesh="dp=2", zero=0, compile="eager", instructions=0, micro=1, pipeline="1f1b")
args, cfg = peer.args, peer.cfg
names, sizes = zip(*(part.split("=") for part in args.mesh.split(",")), strict=True)
mesh = fp.make_mesh(
    [int(size) for size in sizes], names, kind="job" if peer.world > 1 else "simulated", device="cpu"
)
rules = training.make_rules(names, args.zero)
functions = training.make_functions(cfg, micro=args.micro)
init = fp.jit(functions.init_state, mesh=mesh, rules=rules)
train = fp.jit(
    functions.train_step,
    mesh=mesh,
    rules=rules,
    donate_argnums=0,
    compile=args.compile,
    pipeline=args.pipeline,
)

state = init(fp.random.key(0))
state = state.replace(params=training.initial_params(cfg, state.params))

by_rows = fp.NamedSharding(mesh, P("dp") if "dp" in names else P())
parts = mesh.shape.get("dp", 1)
index = mesh.coords(peer.rank).get("dp", 0)


def batch(t: int) -> dict[str, fp.Array]:
    """This rank's rows, as a part of the global batch."""
    local = training.batch_of(*peer.rows(t, index, parts))
    return {name: fp.make_array_from_process_local_data(by_rows, x) for name, x in local.items()}


def step(t: int) -> float:
    global state
    state, metrics = train(state, batch(t))
    return float(metrics["loss"])


def instructions(run: Callable[[], None]) -> str:
    """Where the time of a step goes, if --instructions asks for it."""
    (compiled,) = train.cache.values()
    schedule = compiled.lowered.schedule
    peer.report["instructions"] = len(schedule.program(peer.rank))
    peer.report["predicted_mb"] = round(compiled.lowered.memory().peak() / 1e6, 1)
    if not args.instructions:
        return ""
    times = InstructionTimes(compiled.runner.executor)
    for _ in range(args.instructions):
        run()
    return times.table(args.instructions)


peer.loop(step, instructions)
