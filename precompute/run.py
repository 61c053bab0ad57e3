"""The whole job: plan the store if there is none, bind it to weights and engine, and fill what is not sealed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from cache_tools.arrays import METADATA
from cache_tools.errors import ConfigError, DflashError, StoreError, TargetError
from cache_tools.files import TEMPORARY_NAME, write_file, writing
from cache_tools.inspection import describe
from cache_tools.manifest import EngineSpec, Manifest
from cache_tools.progress import progress_bar
from cache_tools.reader import Store
from cache_tools.seals import PLAN_SEAL, read_manifest, root_metadata
from cache_tools.writer import SampleColumns, bind_engine, create_store
from precompute import fingerprints
from precompute.config import PrecomputeConfig
from precompute.locking import store_lock
from precompute.planning import Plan, manifest_now, plan
from precompute.reporting import require_space, store_size
from precompute.worker import Job, WorkDone, run_job, work_for_parent

# Whatever of these is installed can change the last bits of hidden states.
_ENGINE_PACKAGES = ("torch", "transformers", "flash-attn", "flash-linear-attention", "causal-conv1d")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What one run did, and what the store is afterwards."""

    store: str
    complete: bool
    samples: int
    tokens: int
    rejected: int
    hidden_bytes: int
    bytes_per_token: float
    ratio: float  # uncompressed size / size on disk, hidden states only
    computed_shards: int  # by this run
    computed_tokens: int
    seconds: float  # that this run took to compute them, loading the target included
    ktok_per_second: float
    write_wait_share: float  # of that time in which the target waited for writing, averaged over workers


def run(config: PrecomputeConfig) -> RunSummary:
    """Makes or completes the store. Raises ConfigError, DataError, TargetError or StoreError."""
    path = store_path(config)
    workers_and_devices(config)  # says so if there are none, before anything is written
    if not path.exists():
        write_plan(plan(config), path)
    Store.open(path)  # says so if this is no store, before it is locked
    with store_lock(path) as lock:
        bind(config, path, check_plan(config, path))
        return fill(config, path, lock)


def bind(config: PrecomputeConfig, path: Path, manifest: Manifest) -> None:
    """Ties the store of this plan to the present weights and engine, or refuses. Raises StoreError, TargetError."""
    bound = bound_manifest(config, manifest)
    seals = [name for name in os.listdir(path / "sealed") if not TEMPORARY_NAME.fullmatch(name)]
    if read_manifest(path) != bound and seals == [Path(PLAN_SEAL).name]:
        # Nothing was computed yet, so a first attempt (say, with batches too large for the GPU) binds nobody.
        with writing(path):
            write_file(path / METADATA, root_metadata(manifest))
    bind_engine(path, bound)


def fill(config: PrecomputeConfig, path: Path, lock: int) -> RunSummary:
    """Computes whatever is not sealed in a store that is bound, while its lock is held."""
    workers, devices = workers_and_devices(config)
    store = Store.open(path)
    missing = [shard for shard in range(store.num_shards) if shard not in store.sealed]
    jobs = _jobs(config, store, missing, workers, devices)
    tokens = _tokens_in(store, missing)
    _check_space(store, tokens)
    started = time.monotonic()
    waited = _compute(jobs, tokens, lock) if jobs else 0.0
    seconds = time.monotonic() - started
    _require_usable(path)
    return _summary(path, len(missing), tokens, seconds, waited / max(len(jobs), 1))


def write_plan(planned: Plan, path: Path) -> None:
    """Writes the planned store at `path`. Raises StoreError when it exists or the disk is too small."""
    found = planned.tokenised.samples
    size = store_size(planned.manifest, found.length, int(found.supervised.sum()))
    require_space(path, size["needed"], planned.manifest.codec)
    create_planned(planned, path)


def create_planned(planned: Plan, path: Path) -> None:
    """Writes the planned store at `path`, however full the disk is. Raises StoreError."""
    order, samples = planned.layout.order, planned.tokenised.samples
    columns = SampleColumns(source=samples.source[order], row=samples.row[order])
    with progress_bar(total=planned.layout.num_tokens, unit="tok", desc="write plan") as bar:
        create_store(path, planned.manifest, planned.layout, columns, planned.ordered_tokens(), planned.files, bar)


def store_path(config: PrecomputeConfig) -> Path:
    if config.store is None:
        raise ConfigError("no store given", fix="pass --store FOLDER")
    return config.store


def check_plan(config: PrecomputeConfig, path: Path) -> Manifest:
    """What the store must be bound to, without engine.

    Raises StoreError when there is no store at `path`, or naming each field that changed.
    """
    stored = Store.open(path).manifest
    now = manifest_now(config, stored)
    require_same_plan(path, stored, now)
    return now


def require_same_plan(path: Path, stored: Manifest, now: Manifest) -> None:
    """Raises StoreError naming each field in which the plan `now` differs from that of the store's manifest."""
    differences = stored.plan().differences(now)
    if differences:
        raise StoreError(
            "the store was planned for something else",
            where=path,
            got="; ".join(map(str, differences)),
            fix="restore what changed, or make a new store with another --store",
        )


def bound_manifest(config: PrecomputeConfig, manifest: Manifest) -> Manifest:
    """A plan's manifest with the present weights and engine. Raises TargetError when there are no weights."""
    weights = fingerprints.weight_files(config.target)
    total = sum(file.stat().st_size for file in weights)
    with progress_bar(total=total, unit="B", desc="hash weights") as bar:
        digest = fingerprints.weights_sha256(config.target, num_threads=_num_threads(config), progress=bar)
    engine = EngineSpec(
        name="transformers",
        batch_tokens=config.batch_tokens,
        device=_device_name(workers_and_devices(config)[1][0]),
        attention=config.attention,
        versions={name: version for name in _ENGINE_PACKAGES if (version := _installed_version(name))},
    )
    return dataclasses.replace(
        manifest, target=dataclasses.replace(manifest.target, weights_sha256=digest), engine=engine
    )


def workers_and_devices(config: PrecomputeConfig) -> tuple[int, list[str]]:
    """Number of worker processes, and the device of each. Raises ConfigError when they do not exist."""
    import torch

    num_gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and num_gpus == 0:
        raise ConfigError("no CUDA device is visible", got="--device cuda", fix="pass --device cpu")
    if num_gpus == 0:
        workers = config.workers or 1
        return workers, ["cpu"] * workers
    workers = config.workers or num_gpus
    if workers > num_gpus:
        raise ConfigError("more workers than GPUs", got=f"{workers} workers, {num_gpus} GPUs")
    return workers, [f"cuda:{index}" for index in range(workers)]


def _jobs(config: PrecomputeConfig, store: Store, missing: list[int], workers: int, devices: list[str]) -> list[Job]:
    """Missing shards dealt out in turn; workers without any are left out, unless weights or scales must be stored."""
    count = min(workers, max(len(missing), 0 if store.has_target and store.has_scales else 1))
    return [
        Job(
            store=store.path,
            target=config.target,
            shards=tuple(missing[index::count]),
            writes_target=index == 0 and not store.has_target,
            calibrates=index == 0,
            dtype=config.dtype,
            attention=config.attention,
            device=devices[index],
            batch_tokens=config.batch_tokens,
            num_threads=max(_num_threads(config) // count, 1),
            on_bad=config.on_bad,
        )
        for index in range(count)
    ]


def _compute(jobs: list[Job], tokens: int, lock: int) -> float:
    """Does all jobs; returns the seconds that their targets waited for writing, summed over jobs."""
    waited = 0.0
    with progress_bar(total=tokens, unit="tok", desc="precompute") as bar:

        def report(done: WorkDone) -> None:
            nonlocal waited
            waited += done.waited_seconds
            bar.update(done.tokens)

        if len(jobs) == 1:
            run_job(jobs[0], report)
        else:
            _run_processes(jobs, lock, report)
    return waited


def _run_processes(jobs: list[Job], lock: int, report: Callable[[WorkDone], None]) -> None:
    """One process per job. The first failure ends all of them and is raised."""
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, Any] = {}
    try:
        for index, job in enumerate(jobs):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (job, _LockDuplicate(lock), sender)
            process = context.Process(target=work_for_parent, args=arguments, name=f"worker {index}")
            process.start()
            sender.close()  # so that the end of the process is the end of the pipe
            processes[receiver] = process
        running = dict(processes)
        while running:
            ready: list[Any] = multiprocessing.connection.wait(list(running))
            for connection in ready:
                try:
                    message = connection.recv()
                except EOFError:
                    _require_success(running.pop(connection))
                    continue
                if isinstance(message, DflashError):
                    raise message
                report(message)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


class _LockDuplicate:
    """The lock's file descriptor in a child process; pickled while the child is being started."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (DupFd(self._descriptor),)


def _identity(duplicate: Any) -> Any:
    return duplicate


def _require_success(process: Any) -> None:
    process.join()
    if process.exitcode != 0:
        code = process.exitcode
        raise TargetError(
            f"{process.name} died",
            got=f"killed by signal {-code}" if code < 0 else f"exit code {code}",
            fix="see its messages above; the same command goes on where it stopped",
        )


def _check_space(store: Store, missing_tokens: int) -> None:
    size = store_size(store.manifest, store.samples.length, int(store.samples.supervised.sum()))
    require_space(store.path, int(size["needed"] * missing_tokens / store.num_tokens), store.manifest.codec)


def _require_usable(path: Path) -> None:
    """Raises TargetError when not a single sample of the store has hidden states."""
    store = Store.open(path)
    if len(store.rejected) == store.num_samples:
        first = store.rejections[0]
        raise TargetError(
            "every sample was rejected",
            where=path,
            got=f"{store.num_samples} samples without hidden states; sample 0, layer {first.layer}: {first.reason}",
            expected="at least one sample with usable hidden states",
            fix="check the target, its precision and attention, then remove the store and run again",
        )


def _tokens_in(store: Store, shards: list[int]) -> int:
    ranges = [store.shard_samples(shard) for shard in shards]
    return sum(int(store.samples.length[r.start : r.stop].sum()) for r in ranges)


def _num_threads(config: PrecomputeConfig) -> int:
    return config.threads or os.cpu_count() or 1


def _device_name(device: str) -> str:
    import torch

    return "cpu" if device == "cpu" else f"cuda ({torch.cuda.get_device_name(device)})"


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _summary(path: Path, num_shards: int, tokens: int, seconds: float, waited: float) -> RunSummary:
    store = Store.open(path)
    hidden: Any = describe(store)["hidden"]
    return RunSummary(
        store=str(path),
        complete=store.complete,
        samples=store.num_samples,
        tokens=store.num_tokens,
        rejected=len(store.rejected),
        hidden_bytes=hidden["bytes"],
        bytes_per_token=round(hidden["bytes_per_token"], 1),
        ratio=round(hidden["ratio"], 4),
        computed_shards=num_shards,
        computed_tokens=tokens,
        seconds=round(seconds, 3),
        ktok_per_second=round(tokens / max(seconds, 1e-9) / 1000, 3),
        write_wait_share=round(waited / seconds, 4) if seconds and tokens else 0.0,
    )
