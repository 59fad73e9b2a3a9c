"""Tables for the pure judgement of causes: exceptions, devices and shared memory -> what was behind them."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from unbroken.rundir.last_words import Ending, LastWords
from unbroken.supervisor.judging.outcome import judge
from unbroken.supervisor.judging.verdict import DeviceError, ExitStatus, Facts, SeenException, SharedMemory

CODE = ExitStatus
BY = {name: ExitStatus(signal_number=number) for name, number in signal.Signals.__members__.items()}


def words(ending: Ending, **fields: object) -> LastWords:
    return LastWords(ending=ending, step=7, **fields)  # type: ignore[arg-type]


IN_WORKER = """Caught it in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/dev/shm/code/data.py", line 3, in __getitem__
    return table[name]  # ConnectionResetError, No space left
"""


@pytest.mark.parametrize(
    ("kind", "message", "cause"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "device-memory"),
        ("torch.cuda.OutOfMemoryError", "CUDA out of memory.", "device-memory"),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 2.00 GiB", "device-memory"),
        ("RuntimeError", "CUDA error: out of memory", "device-memory"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "device-memory"),
        (
            "tensorflow.python.framework.errors_impl.ResourceExhaustedError",
            "OOM when allocating tensor with shape[8,8]",
            "device-memory",
        ),
        (
            "jaxlib.xla_extension.XlaRuntimeError",
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes",
            "device-memory",
        ),
        ("ResourceExhaustedError", "train.ckpt: No space left on device", "disk-full"),
        ("MemoryError", "", "memory"),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 9 GiB", "memory"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", "memory"),
        ("OSError", "[Errno 12] Cannot allocate memory", "memory"),
        ("OSError", "[Errno 28] No space left on device: 'x.pt'", "disk-full"),
        ("OSError", "[Errno 122] Disk quota exceeded: 'x.pt'", "disk-full"),
        ("storage-full", "x: no space", "disk-full"),
        ("OSError", "[Errno 30] Read-only file system: 'x.pt'", "read-only"),
        ("RuntimeError", "unable to write to file </torch_71_9_0>: No space left (28)", "shared-memory"),
        ("RuntimeError", "DataLoader worker (pid 9) is killed by signal: Bus error.", "shared-memory"),
        ("torch.distributed.DistBackendError", "NCCL error in: x.cpp, unhandled system error", "collective"),
        (
            "RuntimeError",
            "[/p/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:47",
            "collective",
        ),
        ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "device"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "network"),
        ("urllib.error.URLError", "<urlopen error timed out>", "network"),
        ("urllib.error.HTTPError", "HTTP Error 503: Service Unavailable", "network"),
        ("requests.exceptions.HTTPError", "429 Client Error: Too Many Requests for url: http://x", "network"),
        ("httpx.HTTPStatusError", "Server error '502 Bad Gateway' for url 'http://x'", "network"),
        ("urllib.error.HTTPError", "HTTP Error 404: Not Found", ""),
        ("requests.exceptions.HTTPError", "401 Client Error: Unauthorized for url: http://x:500/", ""),
        ("OSError", "We couldn't connect to 'https://huggingface.co' to load the files", "network"),
        ("OSError", "[Errno 113] No route to host", "network"),
        ("socket.gaierror", "[Errno -3] Temporary failure in name resolution", "network"),
        ("OSError", "[Errno 5] Input/output error", "storage"),
        ("OSError", "[Errno 116] Stale file handle: 'x'", "storage"),
        ("OSError", "[Errno 107] Transport endpoint is not connected: 'x'", "storage"),
        ("FloatingPointError", "Loss became infinite or NaN at iteration=5!", "not-finite"),
        ("not-finite", "train: expected a checkpoint to go on from, found 2", "not-finite"),
        ("NanLossDuringTrainingError", "", "not-finite"),
        ("ValueError", "loss is nan", "not-finite"),
        ("RuntimeError", "step 7: train_loss=-inf", "not-finite"),
        ("AssertionError", "non-finite gradient norm", "not-finite"),
        ("RuntimeError", "Function 'MulBackward0' returned nan values in its 0th output.", "not-finite"),
        (
            "RuntimeError",
            "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot",
            "not-finite",
        ),
        (
            "ValueError",
            "Expected parameter loc to satisfy Real(), but found invalid values:\ntensor([1., nan])",
            "not-finite",
        ),
        ("InvalidArgumentError", "logits : Tensor had NaN values", "not-finite"),
        ("ValueError", "Input contains NaN.", ""),
        ("RuntimeError", "train/loss is NaN/Inf: it can't go on, that's it", "not-finite"),
        ("ValueError", "NaN in the output of layer 3", "not-finite"),
        ("KeyError", "'inf_loss'", ""),
        ("KeyError", "'loss/inf'", ""),
        ("RuntimeError", "no column 'loss/nan' in \"grad/inf\"", ""),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'outputs/nan/metrics.json'", ""),
        ("RuntimeError", "cannot read outputs/nan/metrics.json", ""),
        ("ValueError", "could not convert string to float: 'nan' in column weight", ""),
        ("ValueError", "Expected parameter max_norm to be finite, found inf", ""),
        ("AssertionError", "output shape (3, inf)", ""),
        ("ValueError", "no info about the loss", ""),
        ("OSError", "gtp2 is not a local folder and is not a valid model identifier", ""),
        ("OSError", "image file is truncated (3 bytes not processed)", ""),
        ("OSError", "[Errno 24] Too many open files: 'x'", ""),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'x'", ""),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/dev/shm/x'", ""),
        ("FileNotFoundError", "no file /data/Gloo set", ""),
        ("PermissionError", "[Errno 13] Permission denied: '/dev/shm/x'", ""),
        ("OSError", "[Errno 28] No space left on device: '/dev/shm/x'", "shared-memory"),
        ("RuntimeError", "unable to open file </torch_71_9_0>: Too many open files (24)", ""),
        ("KeyError", f"{IN_WORKER}KeyError: 'x'", ""),
        ("OSError", f"{IN_WORKER}OSError: [Errno 28] No space left on device: '/data/x'", "disk-full"),
        ("ValueError", "bad shape", ""),
        ("RuntimeError", "CUDA error: device-side assert triggered", ""),
    ],
)
def test_what_ran_out_or_was_lost_is_read_from_the_exception(kind: str, message: str, cause: str) -> None:
    said = words("failed", kind=kind.rpartition(".")[2], message=message)
    assert judge(CODE(code=1), said, Facts()).cause == cause
    seen = SeenException(kind=kind, message=message, frame="train.py:3")
    verdict = judge(CODE(code=1), None, Facts(seen_exception=seen))
    assert verdict.cause == cause
    assert bool(verdict.hint) == (cause not in ("", "network", "storage"))


def test_who_holds_memory_of_the_device_is_named_only_where_it_ran_out() -> None:
    facts = Facts(device_holders=("process 7 (python), 40000 MB of GPU 0",))
    said = words("failed", kind="OutOfMemoryError", message="CUDA out of memory.")
    assert "process 7" in judge(CODE(code=1), said, facts).evidence[-1]
    assert "process 7" not in " ".join(judge(CODE(code=1), words("failed", kind="KeyError"), facts).evidence)


LOST = DeviceError(code=79, line="NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")


def test_a_failed_device_is_known_by_the_number_of_its_error() -> None:
    verdict = judge(BY["SIGABRT"], None, Facts(device_errors=(LOST,)))
    assert (verdict.cause, "Xid" in verdict.evidence[-1]) == ("device", True)
    ours = DeviceError(code=31, line="NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault")
    verdict = judge(BY["SIGABRT"], None, Facts(device_errors=(ours,)))
    assert (verdict.cause, "Xid" in verdict.evidence[-1]) == ("", True)


@pytest.mark.parametrize(
    ("status", "said", "process_id", "cause"),
    [
        (CODE(code=1), words("failed", kind="KeyError", message="'x'"), None, ""),
        (CODE(code=1), words("failed", kind="KeyError", message="'x'"), 812, ""),
        (
            CODE(code=1),
            words("failed", kind="RuntimeError", message="CUDA error: an illegal memory access"),
            None,
            "device",
        ),
        (BY["SIGABRT"], words("running"), 812, "device"),
        (BY["SIGABRT"], words("running"), 99, ""),
        (BY["SIGKILL"], words("running"), 812, "device"),
        (BY["SIGKILL"], words("running"), None, ""),
        (CODE(code=0), words("running"), None, ""),
        (CODE(code=0), words("completed"), 812, ""),
    ],
)
def test_a_device_of_this_machine_that_failed_explains_only_what_may_have_come_of_it(
    status: ExitStatus, said: LastWords, process_id: int | None, cause: str
) -> None:
    error = replace(LOST, process_id=process_id)
    verdict = judge(status, said, Facts(processes=frozenset({812}), device_errors=(error,)))
    assert verdict.cause == cause


@pytest.mark.parametrize(
    ("free", "total", "cause"),
    [(60, 64, "shared-memory"), (100, 24_000, "shared-memory"), (23_000, 24_000, "")],
)
def test_a_bus_error_beside_small_or_full_shared_memory_says_so(free: int, total: int, cause: str) -> None:
    shared = SharedMemory(free_bytes=free << 20, total_bytes=total << 20)
    verdict = judge(BY["SIGBUS"], words("running"), Facts(shared_memory=shared))
    assert (verdict.outcome, verdict.kind, verdict.cause) == ("signalled", "SIGBUS", cause)
    assert "/dev/shm" in verdict.evidence[1]
    # A file that was cut off gives the same signal.
    assert verdict.confidence == ("likely" if cause else "certain")
