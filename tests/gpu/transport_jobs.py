"""Two processes that send to each other, on the GPUs there are. ``python -m tests.gpu.transport_jobs [cpu]`` is one."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from trimtab.config import load
from trimtab.transport.interface import Label, Message
from trimtab.transport.opening import group_exchange, open_transport

MESSAGES, SIDE = 12, 1024
CPU = "cpu" in sys.argv[1:]
_CYCLES = 30_000_000
"""About 20 ms of a GPU."""


def strided(device: torch.device) -> int:
    """What has gaps is copied by the transport, on a stream that is busy, behind the event that the sender knows of.
    How many messages came that are something else."""
    transport = open_transport(
        "ucx", dist.get_rank(), 2, group_exchange(), load(None, os.environ).config.transport, device
    )
    wrong = 0
    came: list[Message] = []
    for number in range(MESSAGES):
        x = torch.arange(SIDE * SIDE, dtype=torch.float32, device=device).view(SIDE, SIDE) + number
        if dist.get_rank() == 0:
            ready = None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
                event.synchronize()
                ready = event.query
                torch.cuda._sleep(_CYCLES)
            transport.send(1, Label(False, 0, number), [x.t()], ready).result(20.0)
        else:
            while not came:
                assert transport.wait(20.0), "nothing comes"
                came += [one for one in transport.poll() if isinstance(one, Message)]
            message = came.pop(0)
            wrong += not torch.equal(message.tensors[0], x.t())
            message.release()
    dist.barrier()
    transport.close()
    return wrong


def main() -> None:
    """One process."""
    torch.use_deterministic_algorithms(True)  # new memory is filled with not-a-number
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if not CPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    sys.stdout.write(f"RESULT {os.environ['RANK']} {json.dumps(strided(device))}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
