"""What is recorded for each way of training, and what is not: data, for ``trimtab doctor`` and the documentation.

Whatever is claimed here is shown by a test that the row names, or stands as unchecked. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Aspect(StrEnum):
    """What there is to record of a job."""

    STEPS = "steps"
    LAYERS = "layers"
    """Forward and backward of each layer, of the embedding and the head."""
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    """Every collective, send and receive, with its true end."""
    DATA = "data"
    OPTIMIZER = "optimizer"
    CHECKPOINTS = "checkpoints"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of training, or one thing that a job may use. An aspect in none of the four does not concern it."""

    name: str
    recorded: tuple[Aspect, ...] = ()
    in_part: tuple[Aspect, ...] = ()
    not_recorded: tuple[Aspect, ...] = ()
    unchecked: tuple[Aspect, ...] = ()
    """Nothing speaks against it, and nobody has tried."""
    missing: str = ""
    """What is recorded in part or not at all, and why."""
    tests: tuple[str, ...] = ()
    """``file::function`` of the tests on the CPU, most of them over gloo, that show it."""
    gpu: str = ""
    """What was seen on GPUs, over NCCL where there are several; empty: nothing was tried."""
    package: str = "torch"
    """Distribution without which nobody trains so."""
    needs_gpu: bool = False

    def word(self, aspect: Aspect) -> str:
        """``yes``, ``part``, ``no``, ``?`` (unchecked), or nothing."""
        places = {"yes": self.recorded, "part": self.in_part, "no": self.not_recorded, "?": self.unchecked}
        return next((word for word, aspects in places.items() if aspect in aspects), "")

    @property
    def checked(self) -> str:
        """Where it was seen to be so."""
        return "; ".join([*(["CPU"] if self.tests else []), *([self.gpu] if self.gpu else [])]) or "not checked"

    @property
    def summary(self) -> str:
        """One line: what is recorded, what is not or only in part, and what nobody has tried."""
        groups = {
            "recorded": self.recorded,
            "in part": self.in_part,
            "not": self.not_recorded,
            "unchecked": self.unchecked,
        }
        return "; ".join(f"{word}: {', '.join(aspects)}" for word, aspects in groups.items() if aspects)


_STEPS, _LAYERS, _RECOMPUTE = Aspect.STEPS, Aspect.LAYERS, Aspect.RECOMPUTE
_COMMUNICATION, _DATA, _OPTIMIZER = Aspect.COMMUNICATION, Aspect.DATA, Aspect.OPTIMIZER
_CHECKPOINTS, _EVALUATION = Aspect.CHECKPOINTS, Aspect.EVALUATION

_ENGINE: Final = "tests/dist/test_megatron_engine.py"
_SEEN_MEGATRON: Final = "tests/dist/test_collectives_megatron.py::test_every_communication_is_seen"
_TRAINING: Final = "tests/dist/test_collectives_training.py"
_COMPLETE: Final = "tests/dist/test_collectives_complete.py"
_PARALLEL: Final = "tests/dist/test_plain_parallel.py"
_PIPELINE: Final = "tests/dist/test_pipeline_recorded.py"
_PLAIN: Final = "tests/unit/test_engines_plain.py"
_COMPILE: Final = "tests/unit/test_engines_plain_compile.py"

_MEGATRON: Final = (
    Way(
        name="Megatron-Core: data, tensor, sequence, pipeline and virtual pipeline parallel",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION, _DATA, _OPTIMIZER, _CHECKPOINTS, _EVALUATION),
        missing="checkpoints are those of `megatron.core.dist_checkpointing`, not what a script saves itself",
        tests=(
            f"{_ENGINE}::test_every_layout",
            f"{_ENGINE}::test_evaluation_is_one_span_and_no_step",
            f"{_ENGINE}::test_checkpoints_are_timed",
            f"{_COMPLETE}::test_megatron",
            _SEEN_MEGATRON,
        ),
        package="megatron-core",
        gpu="2 H200, NCCL: DP2, TP2, PP2",
    ),
    Way(
        name="Megatron-Core: activation recompute",
        in_part=(_RECOMPUTE,),
        recorded=(_COMMUNICATION,),
        missing="full recompute is told from forward, layer by layer; what selective recompute repeats lies inside the "
        "backward of its layer",
        tests=(f"{_ENGINE}::test_recomputed_layers_are_told_from_forward", _SEEN_MEGATRON),
        package="megatron-core",
    ),
    Way(
        name="Megatron-Core: expert parallel",
        in_part=(_COMMUNICATION,),
        missing="the dispatchers `alltoall` and `allgather` are seen; `flex` (DeepEP, HybridEP) does not use "
        "torch.distributed",
        tests=(_SEEN_MEGATRON,),
        package="megatron-core",
    ),
    Way(
        name="Megatron-Core: context parallel",
        unchecked=(_LAYERS, _COMMUNICATION),
        missing="it needs Transformer Engine",
        package="megatron-core",
        needs_gpu=True,
    ),
    Way(
        name="Megatron-Core: full-iteration CUDA graph",
        not_recorded=(_STEPS, _LAYERS, _RECOMPUTE, _COMMUNICATION),
        unchecked=(_DATA, _OPTIMIZER),
        missing="once it is captured the schedule runs no more: each replay is one span, and steps have no mark",
        package="megatron-core",
        needs_gpu=True,
    ),
    Way(
        name="Megatron-FSDP",
        unchecked=(_STEPS, _LAYERS, _RECOMPUTE, _COMMUNICATION, _DATA, _OPTIMIZER, _CHECKPOINTS, _EVALUATION),
        package="megatron-core",
        needs_gpu=True,
    ),
    Way(
        name="Transformer Engine, FP8",
        unchecked=(_LAYERS, _RECOMPUTE, _COMMUNICATION),
        missing="overlap of tensor parallel communication by user buffers does not use torch.distributed, and lies in "
        "its layer's time",
        package="transformer-engine",
        needs_gpu=True,
    ),
    Way(
        name="Megatron-Bridge, by the callback",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION, _OPTIMIZER, _EVALUATION),
        unchecked=(_DATA, _CHECKPOINTS),
        missing="shown with a stand-in that follows the documented callbacks around Megatron-Core, not with "
        "Megatron-Bridge itself; ends with training, so that a last checkpoint and evaluation are left out",
        tests=(
            "tests/dist/test_callbacks_megatron_bridge.py::test_a_pretraining_is_recorded_and_nothing_else_changes",
        ),
        package="megatron-bridge",
    ),
)

_COUNTED: Final = "2 H200, NCCL: as many communications as its Flight Recorder counts"
_AS_DDP: Final = "data and checkpoints as for DistributedDataParallel"

_TORCH: Final = (
    Way(
        name="DistributedDataParallel",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION, _OPTIMIZER, _EVALUATION),
        in_part=(_DATA,),
        not_recorded=(_CHECKPOINTS,),
        missing="data that comes from a `DataLoader`; `torch.save` and `torch.distributed.checkpoint` offer no hook: "
        "put `trimtab.span` around them",
        tests=(
            f"{_PARALLEL}::test_ddp_with_accumulation",
            f"{_COMPLETE}::test_ddp_whose_reducer_is_cpp",
            f"{_PLAIN}::test_evaluation_is_no_microbatch_and_has_no_layers",
            "tests/dist/test_attach_plain.py::test_losses_are_bitwise_those_without_it_and_the_files_are_complete",
            "tests/dist/test_examples_plain.py::test_a_fault_is_found_and_the_losses_are_bitwise_those_without",
            "tests/dist/test_examples_plain.py::test_recording_changes_no_bit",
        ),
        gpu=_COUNTED,
    ),
    Way(
        name="FSDP2 (fully_shard), hybrid sharding, with tensor parallel",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION, _OPTIMIZER),
        in_part=(_DATA,),
        not_recorded=(_CHECKPOINTS,),
        missing=f"{_AS_DDP}; a layer's time is that of its work, without the gathering of its parameters",
        tests=(
            f"{_PARALLEL}::test_fully_shard",
            f"{_PARALLEL}::test_a_layer_of_fully_shard_holds_its_work_and_not_its_communication",
            f"{_TRAINING}::test_fully_shard",
            f"{_TRAINING}::test_hybrid_sharding_reduces_over_the_replicas_too",
            "tests/dist/test_examples_plain.py::test_a_fault_is_found_and_the_losses_are_bitwise_those_without",
            "tests/dist/test_examples_plain.py::test_recording_changes_no_bit",
        ),
        gpu=_COUNTED,
    ),
    Way(
        name="FullyShardedDataParallel, the older one",
        recorded=(_COMMUNICATION,),
        unchecked=(_STEPS, _LAYERS, _OPTIMIZER, _EVALUATION),
        not_recorded=(_CHECKPOINTS,),
        in_part=(_DATA,),
        missing=_AS_DDP,
        tests=(f"{_TRAINING}::test_fully_sharded_data_parallel",),
    ),
    Way(
        name="DTensor: tensor and sequence parallel, redistribution",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION, _OPTIMIZER),
        in_part=(_DATA,),
        not_recorded=(_CHECKPOINTS,),
        missing=_AS_DDP,
        tests=(
            f"{_PARALLEL}::test_tensor_parallel",
            f"{_TRAINING}::test_tensor_parallel",
            f"{_TRAINING}::test_redistribution_of_dtensors",
        ),
        gpu=_COUNTED,
    ),
    Way(
        name="torch.distributed.pipelining: GPipe, 1F1B, interleaved, zero bubble",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION, _EVALUATION),
        in_part=(_DATA,),
        not_recorded=(_CHECKPOINTS,),
        unchecked=(_RECOMPUTE,),
        missing=f"{_AS_DDP}; gradients of weights that a zero bubble schedule puts off are one span a stage and "
        "microbatch, without layers",
        tests=(
            "tests/dist/test_plain_pipelining.py::test_every_layer_of_every_microbatch_once",
            "tests/dist/test_plain_pipelining.py::test_evaluation",
            f"{_TRAINING}::test_pipelining",
        ),
    ),
    Way(
        name="trimtab.pipeline, and Megatron-Core's pipelines that run on it",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION),
        unchecked=(_RECOMPUTE, _OPTIMIZER, _EVALUATION),
        in_part=(_DATA,),
        not_recorded=(_CHECKPOINTS,),
        missing=f"{_AS_DDP} or Megatron-Core; each action (forward, backward, gradients of weights) with chunk and "
        "microbatch; gradients of weights that are put off are without layers",
        tests=(
            f"{_PIPELINE}::test_every_message_finds_its_partner_and_every_action_is_there_once",
            f"{_PIPELINE}::test_layers_are_parts_of_the_actions_they_run_in",
            f"{_PIPELINE}::test_a_megatron_job_has_its_losses_and_its_layers_lie_in_actions",
        ),
        gpu="H200, stages that share it; 2 H200, Megatron-Core PP2 x VPP2",
    ),
    Way(
        name="torch.compile",
        recorded=(_COMMUNICATION,),
        in_part=(_LAYERS,),
        not_recorded=(_RECOMPUTE, _OPTIMIZER),
        missing="a compiled model is one region, compiled layers are one each, with nothing inside; a compiled "
        "`optimizer.step` is not reported; communication was checked with the backend `aot_eager`",
        tests=(
            f"{_COMPILE}::test_a_compiled_model_is_one_region",
            f"{_COMPILE}::test_compiled_layers_are_regions",
            f"{_COMPILE}::test_a_compiled_optimizer_step_is_not_reported",
            f"{_TRAINING}::test_compiled_ddp",
            f"{_TRAINING}::test_collectives_in_a_compiled_region",
        ),
        gpu="2 H200, NCCL: DDP, also with the backend inductor",
    ),
    Way(
        name="torch.utils.checkpoint: activation recompute",
        recorded=(_RECOMPUTE,),
        missing="of whole layers and of several together; what is recomputed below a layer lies in its backward",
        tests=(
            f"{_PLAIN}::test_recompute_of_a_reentrant_checkpoint_comes_before_the_backward",
            f"{_PLAIN}::test_recompute_of_another_checkpoint_lies_in_the_backward",
            f"{_PLAIN}::test_recompute_of_several_layers_at_once",
        ),
    ),
    Way(
        name="Lightning, by the callback",
        recorded=(_STEPS, _LAYERS, _COMMUNICATION, _OPTIMIZER, _CHECKPOINTS, _EVALUATION),
        in_part=(_DATA,),
        missing="checkpoints are those of `Trainer.save_checkpoint`; a batch is read before its step begins, so its "
        "read belongs to the step before",
        tests=("tests/dist/test_callbacks_lightning.py::test_a_fit_is_recorded_and_nothing_else_changes",),
        package="lightning",
    ),
)

_PARTS: Final = (
    Way(
        name="Asynchronous, coalesced and batched communication",
        recorded=(_COMMUNICATION,),
        tests=(
            f"{_TRAINING}::test_coalesced_and_asynchronous",
            f"{_COMPLETE}::test_messages_match_by_peer_tag_and_number",
            f"{_COMPLETE}::test_functional_collectives",
        ),
        gpu="2 H200, NCCL: ends as NCCL's own durations say",
    ),
    Way(
        name="CUDA graphs",
        not_recorded=(_LAYERS, _RECOMPUTE, _COMMUNICATION),
        missing="what is captured is left alone; each replay and each capture is one span",
        tests=("tests/unit/test_engines_graphs.py::test_each_replay_is_one_span_and_each_capture_another",),
        needs_gpu=True,
        gpu="H200",
    ),
    Way(
        name="Symmetric memory, NVSHMEM, DeepEP, user buffers",
        not_recorded=(_COMMUNICATION,),
        missing="they do not use torch.distributed; their time lies in the layer's",
        needs_gpu=True,
    ),
    Way(
        name="Asynchronous checkpoints",
        unchecked=(_CHECKPOINTS, _COMMUNICATION),
        missing="of Megatron-Core, the call that starts one would be timed, and not the writing in the background",
    ),
)

WAYS: Final = (*_MEGATRON, *_TORCH, *_PARTS)
"""All of them, in the order of the documentation."""


def concerning(installed: Callable[[str], bool], gpu: bool) -> Iterator[Way]:
    """The ways that can be trained here: ``installed`` says it of a distribution, ``gpu`` whether torch can use one."""
    for way in WAYS:
        if installed(way.package) and (gpu or not way.needs_gpu):
            yield way


def markdown() -> str:
    """The table of the documentation."""
    titles = ("", *Aspect, "seen on", "in part or not, and why")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for way in WAYS:
        cells = (way.name, *(way.word(aspect) for aspect in Aspect), way.checked, way.missing)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
