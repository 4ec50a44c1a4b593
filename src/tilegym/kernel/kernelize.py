"""Kernelizing a model: layers and functions together, a report on them, and the way back."""

from typing import Any
from typing import TypeVar

from torch import nn

from tilegym import env
from tilegym.errors import KernelError
from tilegym.kernel import function_patches
from tilegym.kernel import layer_plan
from tilegym.kernel import modes
from tilegym.kernel import registry
from tilegym.kernel import reports
from tilegym.kernel.reports import Report
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

Model = TypeVar("Model", nn.Module, None)

# In the model's own __dict__, so that a deepcopy or an unpickled model brings its own report along.
_REPORT = "_tilegym_kernel_report"
_process_report: Report | None = None


def kernelize_model(
    model: Model,
    mode: modes.ModeLike = "inference",
    device: str | None = None,
    use_fallback: bool = True,
    *,
    verify: bool = False,
    sample_inputs: Any = None,
) -> Model:
    """Replaces the forwards of ``model``'s bound layers by kernels, and the functions that have kernels.

    Of the layers only this instance's change; functions are replaced in their modules, for the whole process. What an
    earlier call replaced in this model is put back first. Kernelize before ``torch.compile``.

    Args:
        model: any ``nn.Module``; None for the functions only.
        mode: what the model is used for next: "inference", "train", "compile" (inference under torch.compile) or
            "train+compile".
        device: the kind of device that kernels are wanted for; default that of the model's parameters.
        use_fallback: leave what has no usable kernel as it is, and say so in the report and in a warning; with False
            it is an error that lists all of it, and nothing is changed.
        verify: run the model once, compare every layer's kernel with the original on what the layer was given (outputs,
            in train mode gradients too), and leave those that differ as they were.
        sample_inputs: for ``verify``: a mapping of keyword arguments, a tuple of positional ones, or one tensor;
            default the model's own ``dummy_inputs``.

    Returns:
        ``model`` itself; :func:`report` tells what was done.

    Raises:
        KernelError: no model, an unknown mode or device, nothing to verify with, or as ``use_fallback`` says.
    """
    return apply(model, mode, device, use_fallback, verify=verify, sample_inputs=sample_inputs)


def apply(
    model: Model,
    mode: modes.ModeLike,
    device: str | None,
    use_fallback: bool,
    *,
    verify: bool = False,
    sample_inputs: Any = None,
    functions: bool = True,
) -> Model:
    """What :func:`kernelize_model` does, with or without the functions."""
    if not (isinstance(model, nn.Module) or (model is None and functions)):
        wanted = "a torch.nn.Module, or None for the functions only" if functions else "a torch.nn.Module"
        raise KernelError(f"kernels are applied to {wanted}, this is {model!r}")
    if verify and model is None:
        raise KernelError("verify=True compares the layers of a model, and there is none: pass the model")
    parsed = modes.parse_mode(mode, "kernelize_model")
    modes.fallback_chain(parsed)
    kind = modes.parse_device(device, "kernelize_model") or modes.current_device(model)
    report = Report(str(parsed), kind)
    if not env.use_kernels():
        report.note = reports.log_disabled("kernelize_model")
        if _report_of(model) is None:
            _leave(model, report)
        return model

    layers, functions_planned = [], []
    if model is not None:
        layers, report.skipped = layer_plan.plan_layers(model, parsed, kind, verify, sample_inputs)
    if functions:
        kernels = registry.select_function_kernels(kind, parsed)
        functions_planned, skipped = function_patches.plan_functions(kernels, parsed, kind)
        report.skipped += skipped
    report.replaced = [plan.entry for plan in (*layers, *functions_planned)]
    if not use_fallback:
        report.raise_if_incomplete()

    with function_patches.lock:
        _undo(model)
        report.patches = PatchSet(model, __name__)
        with report.patches.all_or_nothing():
            for plan in layers:
                report.patches.replace_forward(
                    plan.layer, plan.forward, Entry(plan.entry.name, plan.entry.original, plan.entry.kernel)
                )
            owner = function_patches.PROCESS if model is None else report
            function_patches.claim(owner, functions_planned, model, report.patches)
        _leave(model, report)
    if not report.replaced and not report.skipped:
        report.note = reports.NOTHING
        reports.warn_once(f"kernelize_model replaced nothing: {reports.NOTHING}", stacklevel=4)
    for entry in report.skipped:
        if entry.original != reports.FUNCTION:
            reports.warn_once(f"{entry.original} was not replaced{entry.by}: {entry.why}", stacklevel=4)
        elif entry.source:  # else its kernels are for other uses, which is nothing to warn of
            reports.warn_once(f"{entry.name} was not replaced: {entry.why}", stacklevel=4)
    return model


def unkernelize_model(model: Model) -> Model:
    """Undoes :func:`kernelize_model`: the model's layers and its claim on the functions.

    A function that another kernelized model uses stays replaced until that one is unkernelized too. With None it
    undoes what was applied without a model, or for models that are gone.
    """
    with function_patches.lock:
        _undo(model)
    return model


def report(model: nn.Module | None = None) -> Report:
    """What the last :func:`kernelize_model` did to ``model`` (None: to the functions, without a model).

    Raises:
        KernelError: it is not kernelized.
    """
    found = _report_of(model)
    if found is None:
        if model is None:
            raise KernelError("no function was kernelized without a model: there is no report")
        raise KernelError(f"this {type(model).__name__} is not kernelized: there is no report")
    return found


def _check_is_model(model: object) -> None:
    if model is not None and not isinstance(model, nn.Module):
        found = type(model).__name__
        raise KernelError(f"kernels are in a torch.nn.Module, or None for the functions: this is {found}")


def _report_of(model: nn.Module | None) -> Report | None:
    _check_is_model(model)
    return _process_report if model is None else vars(model).get(_REPORT)


def _undo(model: nn.Module | None) -> None:
    global _process_report
    _check_is_model(model)
    if model is None:
        _process_report = None
        function_patches.release(function_patches.PROCESS)
        return
    former = vars(model).pop(_REPORT, None)
    if former is not None:
        function_patches.release(former)
        if former.patches is not None:
            former.patches.revert()


def _leave(model: nn.Module | None, report: Report) -> None:
    global _process_report
    if model is None:
        _process_report = report
    else:
        vars(model)[_REPORT] = report
