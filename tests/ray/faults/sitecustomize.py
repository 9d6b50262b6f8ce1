"""Faults in ranks, at chosen moments. Python imports this by itself in every process with its directory on PYTHONPATH.

$FAULTS is a directory. Once only, so that the file is removed first:

    forward-1-6                     kills rank 1 in the middle of the sixth forward pass of its process
    save-0-8                        kills rank 0 while it writes its part of the checkpoint of step 8
    join-raise-1, join-kill-1       rank 1 cannot make the process group, or is killed while it does
    loop-1-6, read-1-6, gil-1-6     rank 1 hangs in Python, in a read, or in C with Python's lock
    at-weights-1                    kills rank 1 where it gets its weights; `PLACES` has all such places
    stopped-at-weights-1            stops it there, as SIGSTOP does
    at-file-1, stopped-at-file-1    the same, where it makes the file of its part of any checkpoint

As long as the file is there:

    pace                            every forward pass begins with that many seconds of sleep
    poison-6                        step 6 raises an error
    eat-6-1                         rank 1 takes 400 MiB in step 6
    storage-error                   no file of a checkpoint can be made

$LISTING_LATE: for so many seconds no listing of a directory has what was made there, as on storage that several
machines share.

$CLOCK_OFF: the seconds that the clock of this node is ahead.
"""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

PLACES = {
    "network": ("raytune_fsdp.run.build", "build_network"),
    "weights": ("raytune_fsdp.run.assemble", "fill"),
    "optimizer": ("raytune_fsdp.run.build", "build_optimizer"),
    "checkpoint": ("raytune_fsdp.run.assemble", "load_into"),
    "batch": ("raytune_fsdp.run.loop", "lr_factor"),
    "backward": ("torch", "Tensor.backward"),
    "update": ("raytune_fsdp.step.train_step", "_clip"),
    "evaluation": ("raytune_fsdp.run.evaluation.losses", "eval_step"),
    "write": ("raytune_fsdp.checkpoint.save_in_flight", "write_pieces"),
    "commit": ("raytune_fsdp.checkpoint.save_in_flight", "make_manifest"),
    "send": ("raytune_fsdp.checkpoint.peers.storage", "PeerDraft.create"),
    "publish": ("raytune_fsdp.checkpoint.peers.storage", "PeerDraft.publish"),
    "prune": ("raytune_fsdp.checkpoint.saver", "prune"),
}
"""Modules, and what is called there."""
LEFT = dict(PLACES)
"""Those that no watch has found yet, in this process or in one that it was forked from."""


def armed(fault: str) -> bool:
    try:
        (Path(os.environ["FAULTS"]) / fault).unlink()
    except FileNotFoundError:
        return False
    return True


def strike(fault: str) -> None:
    if armed(fault):
        os.kill(os.getpid(), signal.SIGKILL)


def strike_at(place: str) -> None:
    if armed(f"stopped-at-{place}"):
        os.kill(os.getpid(), signal.SIGSTOP)
    strike(f"at-{place}")


def poison() -> None:
    step = sys.modules["raytune_fsdp.base.beat"].pulse().step
    if (Path(os.environ["FAULTS"]) / f"poison-{step}").exists():
        raise ArithmeticError(f"step {step} cannot be computed")
    if (Path(os.environ["FAULTS"]) / f"eat-{step}-{os.environ.get('RANK')}").exists():
        bytearray(400 << 20)


def hang(place: str) -> None:
    if armed(f"loop-{place}"):
        while True:
            pass
    if armed(f"read-{place}"):
        os.read(os.pipe()[0], 1)
    if armed(f"gil-{place}"):
        ctypes.PyDLL(None).sleep(1_000_000)


def pace() -> None:
    with contextlib.suppress(OSError, ValueError):
        time.sleep(float((Path(os.environ["FAULTS"]) / "pace").read_text()))


def watch() -> None:
    for each in (watch_places, watch_forward, watch_join):
        threading.Thread(target=each, daemon=True).start()


def watch_join() -> None:
    while not hasattr(sys.modules.get("ray.train.torch.config"), "_setup_torch_process_group"):
        time.sleep(0.01)
    distributed = sys.modules["torch.distributed"]
    join = distributed.init_process_group
    if join.__name__ == "joined":
        return

    def joined(*arguments, **options):
        strike(f"join-kill-{options.get('rank')}")
        if armed(f"join-raise-{options.get('rank')}"):
            raise RuntimeError("no route to host")
        return join(*arguments, **options)

    distributed.init_process_group = joined


def watch_forward() -> None:
    """Ranks import `raytune_fsdp.step.train_step` long after this."""
    while not hasattr(sys.modules.get("raytune_fsdp.step.train_step"), "micro_batch_loss"):
        time.sleep(0.01)
    step = sys.modules["raytune_fsdp.step.train_step"]
    if step.micro_batch_loss.__name__ == "counted":
        return
    calls, forward = iter(range(1, 10**9)), step.micro_batch_loss

    def counted(model, *arguments):
        call = next(calls)
        pace()
        poison()
        hang(f"{os.environ.get('RANK')}-{call}")
        hook = None
        if (Path(os.environ["FAULTS"]) / f"forward-{os.environ.get('RANK')}-{call}").exists():
            last = list(model.modules())[-1]
            hook = last.register_forward_pre_hook(lambda *_: strike(f"forward-{os.environ.get('RANK')}-{call}"))
        try:
            return forward(model, *arguments)
        finally:
            if hook is not None:
                hook.remove()

    step.micro_batch_loss = counted


def watch_places() -> None:
    while LEFT:
        time.sleep(0.01)
        for place, (module, name) in list(LEFT.items()):
            found, _, attribute = f".{name}".rpartition(".")
            owner = getattr(sys.modules.get(module), found.strip("."), None) if found else sys.modules.get(module)
            if hasattr(owner, attribute):
                setattr(owner, attribute, struck_at(place, getattr(owner, attribute)))
                del LEFT[place]


def struck_at(place, function):
    def struck(*arguments, **options):
        strike_at(f"{place}-{os.environ.get('RANK')}")
        return function(*arguments, **options)

    return struck


def watch_imports(event: str, arguments: tuple[object, ...]) -> None:
    # The first of a rank's own imports that a fork has not done: it needs Ray.
    if event == "import" and arguments[0] == "raytune_fsdp.launch.ray.prometheus":
        strike_at(f"imports-{os.environ.get('RANK')}")


def watch_writes(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | Path) and ".distcp" in str(arguments[0]):
        path = Path(arguments[0])
        step, rank = int(path.parent.name.split(".")[0].removeprefix("step-")), path.name.split("_")[2]
        if arguments[1] is not None and "x" in str(arguments[1]) and path.parent.suffix == ".tmp":
            if (Path(os.environ["FAULTS"]) / "storage-error").exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            strike(f"save-{rank}-{step}")
            strike_at(f"file-{rank}")


def list_late(seconds: float) -> None:
    listdir, scandir = os.listdir, os.scandir

    own = os.path.join(os.environ.get("TMPDIR", "/dev/null"), "")  # of this machine alone

    def old(path) -> bool:
        if os.fsdecode(os.path.abspath(path)).startswith(own):
            return True
        try:
            now = time.clock_gettime(5)  # CLOCK_REALTIME_COARSE, which a test that shifts the clock leaves alone
            return now - os.lstat(path).st_ctime > seconds
        except OSError:
            return False

    def late_names(path="."):
        return [name for name in listdir(path) if isinstance(path, int) or old(os.path.join(path, name))]

    class Late:
        def __init__(self, path=".") -> None:
            self.entries = scandir(path)

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            self.entries.close()

        def __iter__(self):
            return (entry for entry in self.entries if old(entry.path))

        close = __exit__

    os.listdir, os.scandir = late_names, Late


def shift_clock(seconds: float) -> None:
    right = time.time
    time.time = lambda: right() + seconds


if "CLOCK_OFF" in os.environ:
    shift_clock(float(os.environ["CLOCK_OFF"]))
if "LISTING_LATE" in os.environ:
    list_late(float(os.environ["LISTING_LATE"]))
if "FAULTS" in os.environ:
    sys.addaudithook(watch_writes)
    sys.addaudithook(watch_imports)
    watch()
    os.register_at_fork(after_in_child=watch)  # which has none of its parent's threads
