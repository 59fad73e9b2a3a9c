"""Whether GPUs are looked for."""

from __future__ import annotations

import glob
import os

# "1" looks for GPUs also where no /dev/nvidia* is, as under WSL; "0" never does.
NVML_VARIABLE = "UNBROKEN_NVML"


def may_have_gpus() -> bool:
    """Tell whether this machine may have GPUs that NVML knows."""
    wanted = os.environ.get(NVML_VARIABLE)
    return wanted != "0" and (wanted is not None or bool(glob.glob("/dev/nvidia[0-9]*")))
