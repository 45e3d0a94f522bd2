"""The job that a recorded run had, from its measured times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trimtab.pipeline.costs import Table
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.simulate.disturbance import Link
from trimtab.pipeline.simulate.job import Job
from trimtab.pipeline.simulate.request import Loads, activation_of, check_size, positive, share


class Times(Protocol):
    """Measured times, ``[stage][chunk]`` and seconds; as :mod:`trimtab.scan.pipeline_times` has them."""

    @property
    def stages(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def forward(self) -> Table: ...
    @property
    def backward(self) -> Table: ...
    @property
    def wgrad(self) -> Table: ...
    @property
    def there_and_back(self) -> bool: ...
    @property
    def transfer(self) -> float: ...
    @property
    def links(self) -> Mapping[Link, float]: ...


def refuse(loads: Loads) -> None:
    """ValueError where options say what the run says."""
    said = {
        "--stages": loads.stages,
        "--chunks": loads.chunks,
        "--forward": loads.forward,
        "--backward": loads.backward,
        "--wgrad": loads.wgrad,
    }
    for option, value in said.items():
        if value is not None:
            raise ValueError(f"{option} and --from: the run says that itself; leave one of them out")


def job_of(times: Times, loads: Loads) -> Job:
    """The run's job. Microbatches and the transfer time are those of ``loads`` where it has any."""
    placement = Placement.V if times.there_and_back else Placement.LOOP
    microbatches = times.microbatches if loads.microbatches is None else loads.microbatches
    if microbatches < 1:
        raise ValueError(f"--microbatches must be at least 1, not {microbatches}")
    check_size(times.stages, times.chunks, microbatches)
    shape = Shape(times.stages, times.chunks, microbatches, placement)

    def parts(table: Table) -> tuple[float, ...]:
        places = (shape.place(position) for position in range(shape.positions))
        return tuple(table[place.stage][place.chunk] for place in places)

    forward = parts(times.forward)
    unit = sum(forward) / times.stages
    own = loads.transfer is None
    return Job(
        times.stages,
        times.chunks,
        microbatches,
        forward,
        parts(times.backward),
        parts(times.wgrad),
        by_stage=False,
        activation=activation_of(loads.activation),
        kept=share(loads.kept, "--kept"),
        latency=unit * positive(loads.latency, "--latency"),
        transfer=times.transfer if own else unit * positive(loads.transfer or 0.0, "--transfer"),
        links=times.links if own else {},
    )
