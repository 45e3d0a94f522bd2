"""NVML through a library of our own making in place of the driver's: mapping, decoding, and what is not supported."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from trimtab.events import THROTTLE_REASONS
from trimtab.record.counters.gpu import CudaReadings
from trimtab.record.counters.nvml import GpuReadings, find_gpu, throttle_names

UUID = "5d1f3ab2-0c44-4a57-b0a5-cc0b5f4b8a10"
ERRORS = {
    pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL: 2,
    pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL: 1,
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: 30,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL: 4,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: 5,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: 6,
    pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER: 7,
}


class Driver:
    """Behaves as pynvml over a driver that knows one GPU; names, constants, types and errors are pynvml's."""

    def __init__(self) -> None:
        self.handles = {f"GPU-{UUID}": "gpu"}
        self.parents: dict[str, str] = {}
        self.failing: dict[str, int] = {}
        self.fields = dict(ERRORS)
        self.calls: list[str] = []
        self.open = 1
        self.reasons = 0x2 | 0x8 | 0x40

    def __getattr__(self, name: str) -> Any:
        value = getattr(pynvml, name)
        if not name.startswith("nvml"):
            return value
        known = {
            "nvmlDeviceGetClockInfo": lambda gpu, kind: {pynvml.NVML_CLOCK_SM: 1410, pynvml.NVML_CLOCK_MEM: 2619}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: 1980 if kind == pynvml.NVML_CLOCK_SM else 3201,
            "nvmlDeviceGetApplicationsClock": lambda gpu, kind: {pynvml.NVML_CLOCK_SM: 1965}[kind],
            "nvmlDeviceGetTemperature": lambda gpu, sensor: {pynvml.NVML_TEMPERATURE_GPU: 88}[sensor],
            "nvmlDeviceGetTemperatureV": lambda gpu, sensor: {pynvml.NVML_TEMPERATURE_GPU: 88}[sensor],
            "nvmlDeviceGetPowerUsage": lambda gpu: 612_345,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: self.reasons,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
            "nvmlDeviceGetFieldValues": self.field_values,
            "nvmlDeviceGetHandleByUUID": self.by_uuid,
            "nvmlDeviceGetHandleByPciBusId": lambda address: {"00000000:1B:00.0": "gpu"}[address],
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda gpu: self.parents[gpu],
            "nvmlDeviceGetUUID": lambda gpu: {"gpu": f"GPU-{UUID}"}[gpu],
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlShutdown": self.shutdown,
        }
        return self.counted(name, known[name])

    def counted(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                raise pynvml.NVMLError(self.failing[name])
            if args and name.startswith("nvmlDeviceGet") and "Handle" not in name:
                assert args[0] == "gpu"
            return function(*args)

        return call

    def by_uuid(self, uuid: str) -> str:
        if uuid not in self.handles:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.handles[uuid]

    def field_values(self, gpu: Any, fields: list[int]) -> Any:
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, number in zip(values, fields, strict=True):
            value.fieldId = number
            if number not in self.fields:
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
                continue
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = self.fields[number]
        return values

    def shutdown(self) -> None:
        self.open -= 1


class Cuda:
    """Stands in for torch.cuda."""

    def __init__(self) -> None:
        self.initialised = True

    def is_initialized(self) -> bool:
        return self.initialised

    def get_device_properties(self, index: int) -> Any:
        assert self.initialised
        return {3: SimpleNamespace(uuid=UUID)}[index]


def test_every_counter_is_decoded_with_its_unit() -> None:
    assert GpuReadings(Driver(), "gpu").read() == {
        "sm_clock_mhz": 1410,
        "sm_clock_set_mhz": 1965,
        "sm_clock_max_mhz": 1980,
        "memory_clock_mhz": 2619,
        "memory_clock_max_mhz": 3201,
        "temperature_c": 88,
        "power_w": 612.345,
        "power_limit_w": 700.0,
        "throttle": ["applications_clocks_setting", "hw_slowdown", "hw_thermal_slowdown"],
        "busy_share": 0.97,
        "memory_busy_share": 0.4,
        "pcie_generation": 5,
        "pcie_width": 16,
        "ecc_corrected_total": 2,
        "ecc_uncorrected_total": 1,
        "nvlink_crc_errors_total": 34,
        "nvlink_replays_total": 5,
        "nvlink_recoveries_total": 6,
        "pcie_replays_total": 7,
    }


def test_names_of_throttle_reasons_stand_in_the_order_of_their_bits() -> None:
    bits = {
        "gpu_idle": pynvml.nvmlClocksEventReasonGpuIdle,
        "applications_clocks_setting": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
        "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
        "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
        "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hw_thermal_slowdown": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        "hw_power_brake_slowdown": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "display_clock_setting": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    }
    assert {name: throttle_names(bit) for name, bit in bits.items()} == {name: [name] for name in THROTTLE_REASONS}
    assert throttle_names(pynvml.nvmlClocksEventReasonAll) == list(THROTTLE_REASONS)
    assert throttle_names(0) == throttle_names(1 << 40) == []


def test_what_is_not_supported_stays_absent_and_is_not_asked_for_again() -> None:
    driver = Driver()
    driver.failing = {
        "nvmlDeviceGetApplicationsClock": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION,
    }
    del driver.fields[pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL]
    readings = GpuReadings(driver, "gpu")
    first, second = readings.read(), readings.read()
    absent = {"sm_clock_set_mhz", "power_w", "nvlink_replays_total"}
    assert absent.isdisjoint(first)
    assert first == second
    assert {"sm_clock_mhz", "power_limit_w", "nvlink_crc_errors_total"} <= set(first)
    assert driver.calls.count("nvmlDeviceGetApplicationsClock") == driver.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_a_passing_error_leaves_a_gap_only() -> None:
    driver = Driver()
    readings = GpuReadings(driver, "gpu")
    driver.failing = {"nvmlDeviceGetTemperature": pynvml.NVML_ERROR_UNKNOWN}
    assert "temperature_c" not in readings.read()
    driver.failing = {}
    assert readings.read()["temperature_c"] == 88


@pytest.mark.parametrize("old", ["driver", "package"])
@pytest.mark.parametrize(
    ("name", "counter"),
    [("nvmlDeviceGetCurrentClocksEventReasons", "throttle"), ("nvmlDeviceGetTemperature", "temperature_c")],
)
def test_a_call_that_has_another_name_elsewhere(
    name: str, counter: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    expected = GpuReadings(Driver(), "gpu").read()[counter]
    if old == "driver":
        driver.failing = {name: pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    else:
        monkeypatch.delattr(pynvml, name)
    assert GpuReadings(driver, "gpu").read()[counter] == expected


def test_a_gpu_is_found_by_its_uuid_whatever_its_number() -> None:
    assert find_gpu(Driver(), SimpleNamespace(uuid=UUID)) == "gpu"


def test_a_slice_of_a_gpu_stands_for_the_whole() -> None:
    driver = Driver()
    driver.handles = {f"MIG-{UUID}": "slice"}
    driver.parents = {"slice": "gpu"}
    assert find_gpu(driver, SimpleNamespace(uuid=UUID)) == "gpu"


@pytest.mark.parametrize("more", [{}, {"uuid": "unknown to NVML"}])
def test_a_gpu_without_a_known_uuid_is_found_by_its_address(more: dict[str, Any]) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0, **more)
    assert find_gpu(Driver(), properties) == "gpu"


def test_nothing_is_touched_before_the_rank_uses_its_gpu() -> None:
    cuda, loaded, index = Cuda(), [], [None]
    cuda.initialised = False
    readings = CudaReadings(cuda, lambda: index[0], lambda: loaded.append(Driver()) or loaded[-1])
    assert readings.read() == {}
    index[0] = 3
    assert readings.read() == {}
    assert not loaded
    cuda.initialised = True
    assert readings.read()["sm_clock_mhz"] == 1410
    readings.read()
    assert len(loaded) == 1
    readings.close()
    assert loaded[0].open == 0


@pytest.mark.parametrize("missing", ["library", "gpu"])
def test_without_nvml_there_is_one_line_for_who_debugs(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.handles = {}

    def load() -> Any:
        if missing == "library":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        return driver

    readings = CudaReadings(Cuda(), lambda: 3, load)
    with caplog.at_level(logging.DEBUG, "trimtab"):
        assert readings.read() == readings.read() == {}
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "no counters of the GPU" in record.message
    readings.close()
    assert driver.open == (1 if missing == "library" else 0)


@pytest.mark.parametrize("usable", [True, False])
def test_doctor_says_whose_counters_there_are(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from trimtab import doctor

    driver = Driver()

    def load() -> Any:
        if not usable:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return driver

    monkeypatch.setattr(doctor, "load_nvml", load)
    known, unknown = SimpleNamespace(uuid=UUID), SimpleNamespace(uuid="", pci_bus_id=9, pci_device_id=0)
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_properties=lambda index: (known, unknown)[index])
    checks = list(doctor._nvml(SimpleNamespace(cuda=cuda)))
    if usable:
        assert [check.state for check in checks] == [doctor.State.OK, doctor.State.NOTE]
        assert checks[0].detail == f"driver 580.65.06; counters of GPU 0 are those of GPU-{UUID}"
        assert "does not know GPU 1" in checks[1].detail
        assert driver.open == 0
    else:
        assert [check.state for check in checks] == [doctor.State.NOTE]
        assert "only of the host" in checks[0].detail
