"""NVML of one GPU: what it offers is read, what it does not offer stays absent.

``library`` is the module ``pynvml`` of nvidia-ml-py. Its calls go through ctypes, so the GIL is free while the driver
works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from trimtab.events import THROTTLE_REASONS

Library = Any
Gpu = Any
"""A device handle of NVML."""
Values = dict[str, Any]

_MILLI: Final = 1000


def load_nvml() -> Library:
    """The library, initialised; ImportError, OSError or its own NVMLError where there is none."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def find_gpu(library: Library, properties: Any) -> Gpu:
    """The handle of a torch device, from its ``torch.cuda.get_device_properties``.

    By UUID, because NVML numbers the GPUs of the machine and knows nothing of CUDA_VISIBLE_DEVICES or
    CUDA_DEVICE_ORDER; by PCI address where torch has no UUID. The slice of a GPU (MIG) stands for the whole of it:
    clocks, power and errors are the GPU's. Raises NVMLError where it cannot be found.
    """
    gpu = _by_uuid(library, str(getattr(properties, "uuid", "")))
    if gpu is None:
        domain = getattr(properties, "pci_domain_id", 0)
        gpu = library.nvmlDeviceGetHandleByPciBusId(
            f"{domain:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
        )
    return gpu


def _by_uuid(library: Library, uuid: str) -> Gpu | None:
    if not uuid:
        return None
    for prefix in ("GPU-", "MIG-"):
        try:
            gpu = library.nvmlDeviceGetHandleByUUID(prefix + uuid)
        except library.NVMLError:
            continue
        return library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu) if prefix == "MIG-" else gpu
    return None


class GpuReadings:
    """Reads all counters of a GPU. From one thread."""

    def __init__(self, library: Library, gpu: Gpu) -> None:
        """``library`` stays initialised until :meth:`close`."""
        self._library = library
        self._gpu = gpu
        self._left = dict(_READINGS)  # less what this GPU does not offer
        self._never = tuple(
            error
            for name in ("NotSupported", "FunctionNotFound", "NoPermission", "InvalidArgument")
            if (error := getattr(library, f"NVMLError_{name}", None)) is not None
        )

    def read(self) -> Values:
        """The counters now. What is not supported is not asked for again."""
        values: Values = {}
        for name, reading in list(self._left.items()):
            try:
                values |= reading(self._library, self._gpu)
            except (*self._never, AttributeError):  # AttributeError: nvidia-ml-py is older than the call
                del self._left[name]
            except self._library.NVMLError:  # the GPU is busy, being reset, or lost: absent this time
                continue
        return values

    def close(self) -> None:
        """Give the library back."""
        self._library.nvmlShutdown()


def throttle_names(bits: int) -> list[str]:
    """Names of the throttle reasons in NVML's bit mask; unknown bits are passed over."""
    return [name for place, name in enumerate(THROTTLE_REASONS) if bits >> place & 1]


def _clocks(library: Library, gpu: Gpu) -> Values:
    return {
        "sm_clock_mhz": library.nvmlDeviceGetClockInfo(gpu, library.NVML_CLOCK_SM),
        "memory_clock_mhz": library.nvmlDeviceGetClockInfo(gpu, library.NVML_CLOCK_MEM),
    }


def _highest_clocks(library: Library, gpu: Gpu) -> Values:
    return {
        "sm_clock_max_mhz": library.nvmlDeviceGetMaxClockInfo(gpu, library.NVML_CLOCK_SM),
        "memory_clock_max_mhz": library.nvmlDeviceGetMaxClockInfo(gpu, library.NVML_CLOCK_MEM),
    }


def _set_clock(library: Library, gpu: Gpu) -> Values:
    return {"sm_clock_set_mhz": library.nvmlDeviceGetApplicationsClock(gpu, library.NVML_CLOCK_SM)}


def _temperature(library: Library, gpu: Gpu) -> Values:
    try:
        celsius = library.nvmlDeviceGetTemperature(gpu, library.NVML_TEMPERATURE_GPU)
    except (AttributeError, library.NVMLError_FunctionNotFound):  # to be removed after CUDA 13
        celsius = library.nvmlDeviceGetTemperatureV(gpu, library.NVML_TEMPERATURE_GPU)
    return {"temperature_c": celsius}


def _power(library: Library, gpu: Gpu) -> Values:
    return {"power_w": library.nvmlDeviceGetPowerUsage(gpu) / _MILLI}


def _power_limit(library: Library, gpu: Gpu) -> Values:
    return {"power_limit_w": library.nvmlDeviceGetEnforcedPowerLimit(gpu) / _MILLI}


def _throttle(library: Library, gpu: Gpu) -> Values:
    try:
        bits = library.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except (AttributeError, library.NVMLError_FunctionNotFound):  # its name before driver 535
        bits = library.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return {"throttle": throttle_names(bits)}


def _utilisation(library: Library, gpu: Gpu) -> Values:
    percent = library.nvmlDeviceGetUtilizationRates(gpu)
    return {"busy_share": percent.gpu / 100, "memory_busy_share": percent.memory / 100}


def _pcie(library: Library, gpu: Gpu) -> Values:
    return {
        "pcie_generation": library.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_width": library.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    }


_FIELDS: Final = {
    "NVML_FI_DEV_ECC_SBE_VOL_TOTAL": "ecc_corrected_total",
    "NVML_FI_DEV_ECC_DBE_VOL_TOTAL": "ecc_uncorrected_total",
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "nvlink_crc_errors_total",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "nvlink_crc_errors_total",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "nvlink_replays_total",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "nvlink_recoveries_total",
    "NVML_FI_DEV_PCIE_REPLAY_COUNTER": "pcie_replays_total",
}
"""Error counters that NVML reads together, and what they add up to."""
_UNION: Final = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Member of NVML's value union by its type (nvmlValueType_t); 0 would be a double, which counts nothing."""


def _errors(library: Library, gpu: Gpu) -> Values:
    names = list(_FIELDS.values())
    found = library.nvmlDeviceGetFieldValues(gpu, [getattr(library, field) for field in _FIELDS])
    values: Values = {}
    for name, field in zip(names, found, strict=True):
        member = _UNION.get(field.valueType)
        if field.nvmlReturn == 0 and member is not None:
            values[name] = values.get(name, 0) + getattr(field.value, member)
    return values


_READINGS: Final[tuple[tuple[str, Callable[[Library, Gpu], Values]], ...]] = (
    ("clocks", _clocks),
    ("highest clocks", _highest_clocks),
    ("set clock", _set_clock),
    ("temperature", _temperature),
    ("power", _power),
    ("power limit", _power_limit),
    ("throttle", _throttle),
    ("utilisation", _utilisation),
    ("pcie", _pcie),
    ("errors", _errors),
)
