"""What torch.compile does not trace. May import torch.

`torch.compiler.disable` imports torch's compiler where it decorates, which takes as long as torch itself. torch decorates its own
functions with what imports it at their first call. That is not public: the tests of delayed scaling and of GroupedLinear hold it.
"""

from torch._compile import _disable_dynamo as uncompiled

__all__ = ["uncompiled"]
