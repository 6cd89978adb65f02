"""What operators make together in a model, measured as one: an Op each, whose variants are built from nn.

Known to the command line beside the operators. May import nn and ops.
"""

from kerneltune.spec import Op


def load() -> dict[str, Op]:
    """All workloads by name; imports torch and triton."""
    from kerneltune.workloads import moe_training

    return {op.name: op for op in moe_training.OPS}
