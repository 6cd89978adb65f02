"""Counts the configs that Triton's autotuner times in this process, and prints results as one line of JSON.

Wraps `Autotuner._bench`, whoever patched `Autotuner.run`.
"""

import gc
import hashlib
import json

from triton.runtime.autotuner import Autotuner

TIMED = []
_bench = Autotuner._bench


def bench(autotuner, *args, **kwargs):
    """Count, then time."""
    TIMED.append(autotuner.base_fn.__name__)
    return _bench(autotuner, *args, **kwargs)


Autotuner._bench = bench


def digest(*tensors):
    """Return a digest of the bits of tensors."""
    import torch

    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def row(*tensors):
    """Return the results, the configs that were launched last, the timings, and what serving counted (None where nothing is)."""
    tuners = [one for one in gc.get_objects() if issubclass(type(one), Autotuner)]
    configs = {one.base_fn.__name__: str(one.best_config) for one in tuners if getattr(one, "best_config", None) is not None}
    try:
        from kerneltune.adopt import startup

        server = startup.server()
    except ImportError:
        server = None
    served = None if server is None else {name: getattr(server, name) for name in ("hits", "misses", "tunings")}
    return {"digest": digest(*tensors), "configs": configs, "timed": len(TIMED), "served": served}


def report(*tensors):
    """Print the line."""
    print(json.dumps(row(*tensors)), flush=True)
