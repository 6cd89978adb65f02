"""Make an operator of calls of a program. Its configs override the result of a function of the program: the getter.

The host of the program depends on the config: it sorts, pads or allocates by a block size. So the whole Python call is checked
and timed. `getter.json` of a folder names getter, call and sizes, from which another process makes the same operator.
"""

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kerneltune import device
from kerneltune.adopt import expert_layer
from kerneltune.adopt.arguments import element_type, torch_dtype
from kerneltune.adopt.configs import DEFAULTS, launch_defaults
from kerneltune.adopt.folder import read_json, write_json
from kerneltune.adopt.operators import TUNED, knob_class
from kerneltune.errors import first_line, meant, statement_in
from kerneltune.spec import Case, Config, Inputs, Op, Outputs, Space, Traffic, Variant
from kerneltune.task import knobs_of
from kerneltune.wording import assignments

if TYPE_CHECKING:
    from torch import Tensor

FILE = "getter.json"
ADDED_OPTIONS = ("num_warps", "num_stages")
"""Options of a launch that an override may add to a config without them, where the call hands them on to the kernel."""
_CALL = "call"
_LEAST_BLOCK = 16
"""Least rows, columns and depth of a matrix product in Triton."""
_STAGES, _GROUPS = (2, 3, 4, 5), (1, 4, 16, 64)
_ACCUMULATORS, _SHARED_BYTES = 128, 232_448
"""Most elements of a product's result in a thread: with more, kernels spill. Bytes of shared memory of a program on sm_90."""


class CallCase(msgspec.Struct, frozen=True):
    """Hold a call of the program at some sizes.

    Attributes:
        own: knobs of the program's own config.
        bytes: bytes of the tensors that the call reads.
        problem: why the call cannot be tuned; empty if it can.
        is_wanted: whether the call is to be tuned; a table gives any other call its own config.
    """

    sizes: dict[str, int]
    own: dict[str, int] = {}
    bytes: int = 1
    problem: str = ""
    is_wanted: bool = True

    @property
    def is_searched(self) -> bool:
        """Return whether the call is searched: it is wanted, and no problem prevents its tuning."""
        return self.is_wanted and not self.problem


class GetterSpec(msgspec.Struct, frozen=True):
    """Hold a getter and the calls that ask it.

    Attributes:
        getter, call: MODULE:FUNCTION or FILE.py:FUNCTION.
        folder: the folder from which modules are imported.
        space: values of knobs, in place of the values around the own configs.
        digest: digest of the code of both functions.
        options: names of `ADDED_OPTIONS` that an override adds.
        defaults: options of a launch that gives none, on the GPU of `probe`.
        weights: how the weights of the calls are quantized; other weights are another operator.
    """

    getter: str
    call: str
    folder: str
    dtype: str
    cases: list[CallCase]
    space: dict[str, list[int]] = {}
    digest: str = ""
    options: list[str] = []
    defaults: dict[str, int] = {}
    weights: expert_layer.Weights = expert_layer.Weights()


def write_spec(root: Path, spec: GetterSpec) -> None:
    """Write the spec of a folder."""
    write_json(root / FILE, spec)
    operators.cache_clear()


def read_spec(root: Path) -> GetterSpec:
    """Return the spec of a folder."""
    return read_json(root / FILE, GetterSpec)


@dataclass(slots=True)
class Getter:
    """Replace a function that gives configs, wherever the program holds it.

    Attributes:
        knobs: values that replace the values of its result; None for the program's own config.
        first_result: first config that the program took since the field was emptied.
        table: table that the function gave, of one empty row for None, until a launch shows the config that the program takes.
    """

    name: str
    function: Callable[..., Any]
    knobs: Mapping[str, int] | None = None
    first_result: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)

    def ask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the program's own result, or of a tuple its first element, with the knobs of the override.

        The knobs are in every row of a table of configs. If the function gives None, they are a table of one row.
        """
        result = self.function(*args, **kwargs)
        own = result[0] if isinstance(result, tuple) and result else result
        rows = {1: {}} if own is None else own
        is_table = isinstance(rows, dict) and {(type(key), type(row)) for key, row in rows.items()} == {(int, dict)}
        self.table = rows if is_table else {}
        if not is_table and (not isinstance(own, dict) or not _integer_knobs(own)):
            shown = " ".join(repr(result).split())
            shown = shown if len(shown) <= 60 else f"{shown[:60]}… ({type(result).__name__})"
            raise ValueError(f"getter: {self.name}: returned {shown}: expected a dict of integers by name")
        self.first_result = self.first_result or ({} if is_table else dict(own))  # the host may change its dict
        if self.knobs is None:
            return result
        knobs = self.knobs
        changed = {key: {**row, **knobs} for key, row in rows.items()} if is_table else {**own, **knobs}
        if result is own:
            return changed
        items = (changed, *result[1:])
        return result._make(items) if hasattr(result, "_make") else items

    def noting_launches(self) -> AbstractContextManager[None]:
        """Note as the first result the integers that a launch behind a table gets by the names of its rows, or by any name."""
        from triton.runtime.jit import KernelInterface

        from kerneltune.interpreter.modes import replaced

        launched: Any = KernelInterface.__getitem__

        def noted(kernel: Any, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                names = {name for row in self.table.values() for name in row} or kwargs.keys()
                knobs = _integer_knobs({name: value for name, value in kwargs.items() if name in names})
                if self.table and knobs:
                    self.first_result, self.table = self.first_result or knobs, {}
                return launched(kernel, grid)(*args, **kwargs)

            return launch

        return replaced({(KernelInterface, "__getitem__"): noted})


def _integer_knobs(values: Mapping[Any, Any]) -> dict[str, int]:
    """Return the knobs of a config: its integers by name."""
    return {name: value for name, value in values.items() if type(value) is int and isinstance(name, str)}


@functools.cache
def installed(name: str, folder: str) -> Getter:
    """Import a getter, and replace it in every module or class that holds it."""
    owner, attribute = _owner_and_name("getter", name, folder)
    function = getattr(owner, attribute)
    getter = Getter(name, function)

    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        return getter.ask(*args, **kwargs)

    is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod | classmethod)
    setattr(owner, attribute, staticmethod(asked) if is_static else asked)
    for module in list(sys.modules.values()):
        held: Any = getattr(module, "__dict__", None)
        for key in [key for key, value in held.items() if value is function] if isinstance(held, dict) else ():
            held[key] = asked
    return getter


def _owner_and_name(field: str, name: str, folder: str) -> tuple[Any, str]:
    """Return the module or class that holds a function, and the function's name in it."""
    where, _, path = name.rpartition(":")
    *classes, attribute = path.split(".")
    if not where or not attribute:
        raise ValueError(f"{field}: {name!r}: expected MODULE:FUNCTION or FILE.py:FUNCTION")
    file = Path(folder, where) if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{field}: {where}: no such file")
    sys.path.extend(entry for entry in (folder, str(file.parent) if file else folder) if entry not in sys.path)
    try:
        owner: Any = importlib.import_module(file.stem if file else where)
    except (Exception, SystemExit) as error:  # the program's own code
        raise ValueError(f"{field}: {where}: importing fails: {statement_in('', error)}{first_line(error)}") from error
    present = getattr(owner, "__file__", None)  # None for a module of Python itself
    if file and not (present and file.samefile(present)):
        raise ValueError(f"{field}: {where}: another module has its name: {present or owner}")
    for part in classes:
        owner = getattr(owner, part, None)
    if not callable(getattr(owner, attribute, None)):
        raise ValueError(f"{field}: {name!r}: {where} has no function {path}{meant(path, vars(owner) if owner else ())}")
    return owner, attribute


@dataclass(slots=True)
class ProgramCall:
    """Hold a call of the program that asks a getter.

    Attributes:
        own: the program's own config.
        is_meta: the tensors have no memory: kernels are compiled, nothing is computed.
        noise: relative difference between two calls with the own config, by output.
    """

    getter: Getter
    function: Callable[[], Any]
    own: Config
    is_meta: bool
    noise: dict[str, float] = field(default_factory=dict)

    def run(self, config: Config) -> Outputs:
        """Return the tensors of the call's result under a config; the own config is no override."""
        self.getter.knobs = None if config == self.own else given_knobs(config)
        try:
            result = self.function()
        except Exception as error:  # the program's own code, on tensors without memory
            is_compiler = type(error).__module__.startswith("triton") or "PassManager" in str(error)
            if not self.is_meta or is_compiler:
                raise
            return {}  # the host needs values: the kernels are compiled when they are launched
        finally:
            self.getter.knobs = None
        listed = result if isinstance(result, dict | list | tuple) else [result]
        parts = listed.items() if isinstance(listed, dict) else enumerate(listed)
        return {f"output {name}": value for name, value in parts if hasattr(value, "untyped_storage")}


def given_knobs(config: Config) -> dict[str, int]:
    """Return the knobs of a config without zeros, which stand for knobs that the program's own dict lacks."""
    return {name: value for name, value in knobs_of(config).items() if value}


@functools.cache
def operators(folder: str) -> tuple[Op, ...]:
    """Return the operator of a folder, in a tuple. A knob that an own config lacks has the default of a launch, else 0."""
    spec = read_spec(Path(folder))
    by_sizes = {tuple(case.sizes.items()): case for case in spec.cases}
    owns = {sizes: spec.defaults | case.own for sizes, case in by_sizes.items() if case.own}
    knobs = dict.fromkeys([*(name for case in spec.cases for name in case.own), *spec.options], int)
    kind = knob_class(f"Config_{spec.digest[:8]}", tuple(knobs.items()))

    def space(_case: Case) -> Space:
        """Return values around the own configs of all calls, or the values that the user gave."""
        own = {name: {config.get(name, 0) for config in owns.values()} for name in knobs}
        around = {name: [value for size in own[name] for value in _around(name, size, spec.weights)] for name in knobs}
        tried = {name: spec.space.get(name) or around[name] for name in knobs}
        return {name: tuple(sorted({*own[name], *tried[name]})) for name in knobs}

    def default(case: Case) -> Config:
        own = owns.get(case.axes, spec.defaults)
        return kind(**{name: own.get(name, 0) for name in knobs})

    name = Path(spec.getter).name.replace(".py:", ".").replace(":", ".")
    op = Op(
        name="-".join([name, spec.digest[:8], *re.findall(r"\w+", str(msgspec.to_builtins(spec.weights)))]),
        axes=tuple(spec.cases[0].sizes),
        free_axes=tuple(spec.cases[0].sizes),
        max_distance=0.0,  # a call keeps the program's config until its own search; the search begins at configs of near calls
        dtypes=(spec.dtype,),
        inputs=partial(make_inputs, folder),
        reference=reference,
        compare=compare,
        traffic=lambda case: Traffic(by_sizes[case.axes].bytes, 0),
        variants=(Variant(TUNED, run_call, config=kind, space=space, invalid=partial(_invalid, spec.weights), default=default),),
        module=__name__,
        origin=(folder,),
    )
    return (op,)


def call_case(spec: GetterSpec, case: CallCase) -> Case:
    """Return the case of a call, named by the sizes that differ between calls, or by all sizes if no size differs."""
    differing = {name: size for name, size in case.sizes.items() if len({other.sizes[name] for other in spec.cases}) > 1}
    return Case(assignments(differing or case.sizes), tuple(case.sizes.items()), spec.dtype)


def _around(name: str, own: int, weights: expert_layer.Weights) -> Iterator[int]:
    """Yield the values of a knob that are tried beside a program's value; none for the splits of a sum, which need buffers.

    The engines swap the operands of fp8 products, so that a block may have 8 rows.
    """
    if name == "num_stages":
        yield from _STAGES
    elif name.startswith("GROUP"):
        yield from _GROUPS
    elif own > 1 and not own & (own - 1) and not name.startswith("SPLIT"):
        sizes = (own // 2, own * 2) if name == "num_warps" else (own // 2, own * 2, own * 4)
        least = 8 if weights.is_fp8 and name.endswith("M") else _LEAST_BLOCK
        yield from (size for size in sizes if size >= least or not name.startswith("BLOCK"))


def _invalid(weights: expert_layer.Weights, case: Case, config: Config) -> str | None:
    """Return the reason why a product's blocks M x N x K fit no GPU, or repeat another config, or None."""
    knobs = {**DEFAULTS, **knobs_of(config)}
    blocks = {name[-1]: size for name, size in knobs.items() if name.startswith("BLOCK")}
    m, n, k = (blocks.get(side, 0) for side in "MNK")
    if m * n > _ACCUMULATORS * 32 * knobs["num_warps"]:
        return "more elements of the result than registers"
    if k > min(weights.block_shape, default=k):
        return "a deeper block than a block of scales, to which the host cuts it"
    itemsize = 1 if weights.is_fp8 else torch_dtype(case.dtype).itemsize
    shared_bytes = (m + n) * k * itemsize * (knobs["num_stages"] - 1)
    return "more shared memory than a program has" if shared_bytes > _SHARED_BYTES else None


_NO_SIZES = ("dtype", "device", "seed")
"""Arguments that a function which makes a call is given beside the sizes."""


def make_call(
    spec: GetterSpec, maker: Callable[..., Any], sizes: Mapping[str, int], device: str, seed: int = 0
) -> Callable[[], Any]:
    """Return a function without arguments that calls the program at some sizes.

    Args:
        maker: the call itself, if it has the arguments of an expert layer. Otherwise it takes the sizes, `dtype`, `device` and
            `seed` that it names, and returns a function without arguments.
    """
    signature = inspect.signature(maker).parameters
    parameters = {name: one for name, one in signature.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    takes_tensors = parameters.keys() >= set(expert_layer.ARGUMENTS)
    takes_any = not takes_tensors and any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    names = expert_layer.SIZES if takes_tensors else [name for name in parameters if name not in _NO_SIZES]
    for name in () if takes_any else sizes:
        if name not in (*names, *expert_layer.SIZES, expert_layer.ALL_EXPERTS):
            raise ValueError(f"call: size {name}: the function takes none: expected one of {', '.join(names)}")
    if takes_tensors:
        return partial(maker, **expert_layer.arguments(parameters, sizes, spec.weights, spec.dtype, device, seed))
    arguments = {**sizes, "dtype": torch_dtype(spec.dtype), "device": device, "seed": seed}
    for name, one in parameters.items():
        if name not in arguments and one.default is one.empty:
            raise ValueError(f"call: argument {name}: missing: give --size {name}=VALUE")
    function = maker(**{name: value for name, value in arguments.items() if takes_any or name in parameters})
    if not callable(function):
        raise ValueError(f"call: returned {type(function).__name__}: expected a function without arguments, such as a partial")
    call: Callable[[], Any] = function
    return call


def tensors_of(call: Callable[[], Any]) -> "dict[str, Tensor]":
    """Return the tensors among the arguments of a partial, by name or place."""
    if not isinstance(call, partial):
        return {}
    named = {**{f"argument {place}": value for place, value in enumerate(call.args)}, **call.keywords}
    return {name: value for name, value in named.items() if hasattr(value, "untyped_storage")}


def make_inputs(folder: str, case: Case, device: str = "cuda", seed: int = 0) -> Inputs:
    """Make a call at the sizes of a case, beside its tensors by name, which no call may change."""
    spec, (op,) = read_spec(Path(folder)), operators(folder)
    getter, own = installed(spec.getter, spec.folder), op.variants[0].default_config(case)
    maker = getattr(*_owner_and_name("call", spec.call, spec.folder))
    try:
        function = make_call(spec, maker, case.sizes, device, seed)
    except Exception:  # the program's own code, on tensors without memory
        if device != "meta":
            raise
        function = dict  # it needs values: the kernels are compiled when they are launched
    return {_CALL: ProgramCall(getter, function, own, device == "meta"), **tensors_of(function)}


def run_call(inputs: Inputs, config: Config) -> Outputs:
    """Call the program under a config."""
    outputs: Outputs = inputs[_CALL].run(config)
    return outputs


def reference(inputs: Inputs) -> Outputs:
    """Return the results under the program's own config, and note how much they vary between two calls."""
    from kerneltune.adopt.effects import relative_difference
    from kerneltune.interpreter.modes import corrected

    call = inputs[_CALL]
    with corrected():
        expected = {name: tensor.clone() for name, tensor in call.run(call.own).items()}
        second = call.run(call.own)
    if not expected:
        raise ValueError("the call returned no tensor: let the case function return a function that returns its results")
    for name, tensor in expected.items():
        call.noise[name], _largest = relative_difference(tensor, second[name])
    return expected


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Return a line for each result that disagrees with the result under the program's own config."""
    from kerneltune.adopt.effects import disagreement

    tensors = [*(value for name, value in inputs.items() if name != _CALL), *expected.values()]
    dtypes = [element_type(tensor.dtype) for tensor in tensors]
    lines = []
    for name, tensor in expected.items():
        if name not in outputs or outputs[name].shape != tensor.shape or outputs[name].dtype != tensor.dtype:
            lines.append(f"{name}: another shape or element type than under the program's own config")
        elif text := disagreement(tensor, outputs[name], inputs[_CALL].noise[name], dtypes):
            lines.append(f"{name}: {text}")
    return lines


def probe(spec: GetterSpec) -> GetterSpec:
    """Call the program at all sizes with its own configs, and return the spec with them. Runs in a process of its own."""
    from kerneltune.identity import code_digest

    device.select_backend()
    getter = installed(spec.getter, spec.folder)
    call = getattr(*_owner_and_name("call", spec.call, spec.folder))
    try:
        digest = code_digest(getter.function)[:4] + code_digest(call)[:4]
    except (ValueError, TypeError):  # a function without source
        digest = "unknown"
    cases = [_probed(spec, getter, call, case) for case in spec.cases]
    searched = [case for case in cases if case.is_searched]
    if not searched:
        raise ValueError(f"call: {spec.call}: {next(case.problem for case in cases if case.is_wanted)}")
    known = {name for case in cases for name in case.own}
    if other := [name for name in spec.space if name not in (*known, *ADDED_OPTIONS)]:
        raise ValueError(f"space: {other[0]}: expected a knob of the own config: {', '.join(sorted(known))}")
    defaults, options = launch_defaults(), [name for name in ADDED_OPTIONS if name not in known]
    getter.knobs = {**searched[0].own, **{name: defaults[name] for name in options}}
    try:
        make_call(spec, call, searched[0].sizes, _torch_device())()
    except Exception:  # the host hands on only the knobs that it knows
        options = []
    getter.knobs = None
    return msgspec.structs.replace(spec, cases=cases, options=options, defaults=defaults, digest=digest)


def _torch_device() -> str:
    return "cuda" if device.current().is_gpu else "cpu"


def _probed(spec: GetterSpec, getter: Getter, call: Callable[..., Any], case: CallCase) -> CallCase:
    """Return a case with its own config and bytes, or with the reason why it cannot be tuned."""
    import torch

    held = torch.cuda.memory_allocated() if device.current().is_gpu else 0
    try:
        function = make_call(spec, call, case.sizes, _torch_device())
        sizes = [tensor.nbytes for tensor in tensors_of(function).values()]
        count = torch.cuda.memory_allocated() - held if device.current().is_gpu else sum(sizes)
        own = None
        for problem in ("never asks the getter", "asks the getter at its first call only: the answer is kept elsewhere"):
            getter.knobs, getter.first_result, getter.table = own, {}, {}
            with getter.noting_launches():
                function()
            if getter.table:
                problem = "no launch behind the getter, which gave None or a table, has integers by name"
            if not getter.first_result:
                return msgspec.structs.replace(case, problem=problem)
            own = _integer_knobs(getter.first_result)  # the host must also take it as an override
    except Exception as error:  # the program's own code
        if isinstance(error, ValueError) and str(error).startswith(("getter: ", "call: ", "named: ", "dtype: ")):
            raise
        return msgspec.structs.replace(case, problem=f"fails with its own config: {statement_in('', error)}{first_line(error)}")
    return msgspec.structs.replace(case, own=own, bytes=max(count, 1))
