"""Shares of a GPU with which matrix products are whole, see :mod:`trimtab.fbd.execute.products`.

Which ones are not depends on the GPU, cuBLAS and the shapes, so they are tried where they are to be used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

Shape = tuple[int, int, int]
"""Rows, outputs and inputs of a linear layer."""
_PATIENCE = 60.0
_AROUND = 4


def whole_shares(wanted: Sequence[int], shapes: Sequence[Shape], environment: Mapping[str, str]) -> dict[int, int]:
    """For each share in percent the nearest with which products of these layers are right, under the MPS that the
    ``environment`` names.

    Raises:
        ValueError: of all that were tried, there is none.
    """
    tried = sorted({max(share + more, 1) for share in wanted for more in range(-_AROUND, _AROUND + 1)})
    told = json.dumps(list(shapes))
    running = {
        share: subprocess.Popen(
            [sys.executable, __file__, told],
            env={**os.environ, **environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)},
        )
        for share in tried
    }
    right = [share for share, process in running.items() if process.wait(_PATIENCE) == 0]
    if not right:
        raise ValueError(f"products are whole with none of the shares {tried} (in percent) of this GPU")
    return {share: min(right, key=lambda one: (abs(one - share), one)) for share in wanted}


if __name__ == "__main__":
    import torch

    from trimtab.fbd.execute.products import wrong_products

    wrong = wrong_products(torch.device("cuda:0"), [tuple(shape) for shape in json.loads(sys.argv[1])])
    sys.exit(1 if wrong else 0)
