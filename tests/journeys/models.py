"""Journeys of models: training steps in fp8, and decoding with int4 weights."""

from journey import PROGRAMS, Place, journey, require


def _train(place: Place, kind: str, way: str) -> None:
    out = place.python(PROGRAMS / "train_steps.py", kind, way, env={"KERNELTUNE_CONFIGS": None}).stdout
    require(out.rstrip().endswith("done"), "the program did not come to its end")


@journey(limit_s=150, packages=("transformers",), ops=None)
def train_dense(place: Place) -> None:
    """Take three steps of a dense model in fp8, and back."""
    _train(place, "dense", "eager")


@journey(limit_s=150, packages=("transformers",), ops=None)
def train_experts(place: Place) -> None:
    """Take three steps of a model with experts in fp8, and back."""
    _train(place, "experts", "eager")


@journey(limit_s=200, packages=("transformers",), ops=None)
def train_dense_compiled(place: Place) -> None:
    """Take the same steps with compiled layers, without a graph break."""
    _train(place, "dense", "compiled")


@journey(limit_s=200, packages=("transformers",), ops=None)
def train_experts_compiled(place: Place) -> None:
    """Take the same steps with compiled layers, without a graph break."""
    _train(place, "experts", "compiled")


@journey(limit_s=120, packages=("transformers",), ops=None)
def decode_int4(place: Place) -> None:
    """Decode with Int4Linear in the place of every linear layer, for batches of 1, 8 and 160, 160 with scales of inputs too."""
    out = place.python(PROGRAMS / "decode_step.py", env={"KERNELTUNE_CONFIGS": None}).stdout
    require(out.rstrip().endswith("done"), "the program did not come to its end")
