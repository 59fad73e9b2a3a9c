"""What was behind an exception, by its name and its words: memory, a disk, a connection, numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from unbroken.supervisor.judging.verdict import Cause, Verdict

HOST_MEMORY_HINT = (
    "give it more memory, or let it take less: fewer data workers, less prefetching, smaller batches"
)
SHARED_MEMORY_HINT = (
    "make /dev/shm larger (in Docker `--shm-size=8g`, in Kubernetes an emptyDir in memory), "
    "or use fewer data workers"
)
DEVICE_HINT = "look at `nvidia-smi` and `dmesg`: the device may need a reset, or the run another machine"
# A data worker's death reaches the trainer as an exception about something else.
_OF_A_DEATH = re.compile(
    r"killed by signal: Killed|exited unexpectedly|SIGKILL|exit ?code:? -9|terminated abruptly"
)
_PERHAPS_OF_A_DEATH = re.compile(r"Connection reset|Broken pipe|EOFError|closed by peer|ncclRemoteError")
# A loader hands on the traceback of its worker; the names of files in it are no words of the error.
_NESTED_FRAMES = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t].*(?:\n|$))*", re.MULTILINE)
# Numbers that are not finite, and what they are of: words that stand near each other, in either order.
_NAN = r"(?:\bNaNs?\b|\b(?:non-?|not )finite\b)"
_NUMBERS = rf"(?:{_NAN}|\binf(?:init(?:e|y))?\b)"
_OF_TRAINING = r"(?<![A-Za-z])(?:loss(?:es)?|grad(?:ient)?s?|(?<!max_)norm|logits?)(?![A-Za-z])"
# Settings, shapes and columns have these as well, and may be infinite by intent.
_OF_MUCH_ELSE = r"(?<![A-Za-z])(?:tensors?|weights?|param(?:eter)?s?|activations?|outputs?)(?![A-Za-z])"
# Names of metrics, columns and files say nothing of what they hold.
_NAMES = re.compile(r"(?<!\w)'[^'\n]*'(?!\w)|(?<!\w)\"[^\"\n]*\"(?!\w)|\S*/\S+\.[A-Za-z]\w*|(?<!\S)/\S+")
# What a server that is busy or down says: later it may do what it refuses now.
_HTTP_FOR_NOW = r"\b(?:408|429|5\d\d)(?=[:,]| [A-Z])"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """The exception is of `kinds`, without its modules, or its message holds `words`.

    With `both` it must be of `kinds` and hold `words`. It is not of a kind in `never`; `without_names`
    leaves out of the message what is in quotes, and paths.
    """

    cause: Cause
    kinds: frozenset[str] = frozenset()
    words: str | None = None
    both: bool = False
    never: frozenset[str] = frozenset()
    without_names: bool = False
    hint: str = ""

    def fits(self, kind: str, message: str) -> bool:
        if kind in self.never:
            return False
        message = _NAMES.sub("", message) if self.without_names else message
        is_said = self.words is not None and re.search(self.words, message) is not None
        return (kind in self.kinds and is_said) if self.both else (kind in self.kinds or is_said)


# In this order: the first that fits counts. What ran out is said inside of words about other things.
_RULES = (
    _Rule(
        cause="shared-memory",
        # Its files are named by other errors too: of rights, or too many of them.
        words=r"(?:</torch_|/dev/shm).*No space left|No space left.*(?:</torch_|/dev/shm)|signal: Bus error",
        hint=SHARED_MEMORY_HINT,
    ),
    _Rule(
        cause="disk-full",
        kinds=frozenset({"storage-full"}),
        words=r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded",
        hint="free space, or raise the quota, where the run writes; `unbroken prune` says what could go",
    ),
    _Rule(
        cause="read-only",
        words=r"\[Errno 30\]|Read-only file system",
        hint="a file system turns read-only after errors of its disk: see `dmesg`, then mount it again",
    ),
    _Rule(
        cause="device-memory",
        kinds=frozenset({"OutOfMemoryError"}),
        words=r"(?i:\b(CUDA|HIP|XPU|MPS backend) (error: )?out of memory)|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|OOM when allocating"
        r"|RESOURCE_EXHAUSTED: .*(?i:memory|allocat)",
        hint="use `run.micro_batches`, a smaller batch or gradient checkpointing",
    ),
    _Rule(
        cause="memory",
        kinds=frozenset({"MemoryError", "_ArrayMemoryError"}),
        words=r"\[Errno 12\]|Cannot allocate memory|can't allocate memory|std::bad_alloc",
        hint=HOST_MEMORY_HINT,
    ),
    _Rule(
        cause="device",
        words=r"fallen off the bus|(?i:uncorrectable ECC)|(?i:device (is|was) lost)|CUDA error: unknown error"
        r"|CUDA error: unspecified launch failure|CUDA driver initialization failed"
        r"|(?i:all CUDA-capable devices are busy or unavailable)|(?i:no CUDA-capable device)",
        hint=DEVICE_HINT,
    ),
    _Rule(
        cause="collective",
        kinds=frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"}),
        # Gloo begins with the place in its sources.
        words=r"NCCL (error|communicator)|nccl(System|Remote|Internal)Error|\bgloo/\S+\.(?:cc|h):\d+\]"
        r"|Gloo connectFullMesh|collective operation timeout",
        hint="one rank that is late or gone lets all others wait: look at the slowest one's output first",
    ),
    _Rule(
        cause="network",
        kinds=frozenset(
            {
                "BrokenPipeError",
                "ConnectionAbortedError",
                "ConnectionError",
                "ConnectionRefusedError",
                "ConnectionResetError",
                "TimeoutError",
                "URLError",
            }
        ),
        # The words of huggingface_hub, whose error is a plain OSError; those of a name server; and numbers.
        words=r"couldn't connect to '?https?:|Temporary failure in name resolution"
        r"|\[Errno (?:10[0-4]|110|111|113)\]",
    ),
    _Rule(
        cause="network",
        kinds=frozenset({"ClientResponseError", "HTTPError", "HTTPStatusError", "HfHubHTTPError"}),
        words=_HTTP_FOR_NOW,
        both=True,
    ),
    # An OSError without its number may be a wrong name or a damaged picture: no time mends those.
    _Rule(
        cause="storage",
        kinds=frozenset({"BlockingIOError", "InterruptedError", "retryable", "save-failed", "storage"}),
        words=r"\[Errno (?:5|107|112|116|121)\]|Input/output error|Stale file handle",
    ),
    # The longer ones are of torch: its anomaly mode, its distributions, its draws from probabilities.
    _Rule(
        cause="not-finite",
        kinds=frozenset({"FloatingPointError", "NanLossDuringTrainingError", "not-finite"}),
        words=rf"(?i:{_OF_TRAINING}.{{0,60}}{_NUMBERS}|{_NUMBERS}.{{0,60}}{_OF_TRAINING}"
        rf"|{_OF_MUCH_ELSE}.{{0,60}}{_NAN}|{_NAN}.{{0,60}}{_OF_MUCH_ELSE})"
        r"|returned nan values in its \d+th output|found invalid values:[\s\S]*\bnan\b"
        r"|contains either `inf`, `nan`",
        # What these are about is a name.
        never=frozenset(
            {
                "AttributeError",
                "FileExistsError",
                "FileNotFoundError",
                "ImportError",
                "IndexError",
                "IsADirectoryError",
                "KeyError",
                "ModuleNotFoundError",
                "NameError",
                "NotADirectoryError",
                "OSError",
                "PermissionError",
                "TypeError",
                "UnboundLocalError",
            }
        ),
        without_names=True,
        hint="a lower learning rate or clipped gradients may help; with health=Health() and "
        "run.step(loss=...) the run goes back by itself and leaves out the batches that caused it",
    ),
)


def explained(verdict: Verdict) -> Verdict:
    """Return `verdict` with the cause of its exception, and what to do about it unless it says so."""
    if verdict.cause or verdict.outcome not in ("failed", "refused"):
        return verdict
    rule = _rule(verdict.kind, verdict.message)
    if rule is None:
        return verdict
    return replace(verdict, cause=rule.cause, hint=verdict.hint or rule.hint)


def cause_of(kind: str, message: str) -> Cause:
    """Return what was behind an exception.

    >>> cause_of("torch.OutOfMemoryError", "CUDA out of memory."), cause_of("KeyError", "'x'")
    ('device-memory', '')
    """
    rule = _rule(kind, message)
    return rule.cause if rule is not None else ""


def hint_of(cause: Cause) -> str:
    """Return what to do about `cause`; empty if that is left to time."""
    return next((rule.hint for rule in _RULES if rule.cause == cause), "")


def tells_of_a_death(message: str) -> bool:
    """Tell whether an exception is what a trainer sees when one of its workers is gone."""
    return _OF_A_DEATH.search(message) is not None


def may_tell_of_a_death(kind: str, message: str) -> bool:
    """Tell the same of one that has other causes as well."""
    return _PERHAPS_OF_A_DEATH.search(f"{kind}: {message}") is not None


def is_of_device(message: str) -> bool:
    """Tell whether an exception is of CUDA or NCCL, whatever it says of the reason."""
    return re.search(r"\b(?:CUDA|cuDNN|CUBLAS|NCCL)|nccl\w+Error", message) is not None


def _rule(kind: str, message: str) -> _Rule | None:
    name, said = kind.rpartition(".")[2], _NESTED_FRAMES.sub("", message)
    return next((rule for rule in _RULES if rule.fits(name, said)), None)
