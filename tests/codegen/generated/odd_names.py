# (Tensor from, Tensor _result, int __fn, int type, float __debug__, float await=1.0) -> Tensor

# Autograd
def autograd(___keyset, /, ___from, _result, __fn, type, _____debug__, ___await=___default_5):
    ___current = ___fast_path.get(___keyset.raw_repr())
    if ___current is not None and ___forward_ad._current_level < 0:
        ___records = ___is_grad_enabled()
        if not (___records and ((___from is not None and ___from.requires_grad) or (_result is not None and _result.requires_grad))):
            ___fn = ___current.fn if not ___profiler._is_profiler_enabled else ___current.named()
            if ___autocast_is_on():
                ___result = ___call_plainly(___fn, ___from, _result, __fn, type, _____debug__, ___await)
            elif ___records:
                ___set_grad_enabled(False)
                try:
                    ___result = ___fn(___from, _result, __fn, type, _____debug__, ___await)
                finally:
                    ___set_grad_enabled(True)
            else:
                ___result = ___fn(___from, _result, __fn, type, _____debug__, ___await)
            if not ___isinstance(___result, ___Tensor):
                ___result = ___structure(___result, ___fn)
            try:
                ___alias = (
                    not (
                        (___s := ___result.untyped_storage()).resizable() and ___uses(___s._cdata) == 2
                    )
                    or ___result is ___from
                    or ___result is _result
                )
            except ___RuntimeError:
                ___alias = True  # perhaps: a layout without a storage of its own
            if ___alias and ___share_memory((___from, _result), (___result,)):
                raise ___alias_error(___result, ___fn, (___from, _result, __fn, type, _____debug__, ___await), {})
            return ___result
        ___apply = ___node.apply
        if ___apply is not None:
            try:
                return ___apply(___current.direct, ___from, _result, __fn, type, _____debug__, *___without_defaults((___await,), (___default_5,)))
            except ___errors as ___error:
                ___node.explain(___error)
                raise
    return ___general(___keyset, ___current, (___from, _result, __fn, type, _____debug__, *___without_defaults((___await,), (___default_5,))), {})

# CompositeExplicitAutograd
def kernel(___from, _result, __fn, type, _____debug__, ___await=___default_5):
    ___fn = ___current.fn if not ___profiler._is_profiler_enabled else ___current.named()
    if ___autocast_is_on() or ___is_excluded(___conjugate):
        ___result = ___call_plainly(___fn, ___from, _result, __fn, type, _____debug__, ___await)
    elif ___is_grad_enabled():
        ___set_grad_enabled(False)
        try:
            ___result = ___fn(___from, _result, __fn, type, _____debug__, ___await)
        finally:
            ___set_grad_enabled(True)
    else:
        ___result = ___fn(___from, _result, __fn, type, _____debug__, ___await)
    if not ___isinstance(___result, ___Tensor):
        ___result = ___structure(___result, ___fn)
    try:
        ___alias = (
            not (
                (___s := ___result.untyped_storage()).resizable() and ___uses(___s._cdata) == 2
            )
            or ___result is ___from
            or ___result is _result
        )
    except ___RuntimeError:
        ___alias = True  # perhaps: a layout without a storage of its own
    if ___alias and ___share_memory((___from, _result), (___result,)):
        raise ___alias_error(___result, ___fn, (___from, _result, __fn, type, _____debug__, ___await), {})
    return ___result

# Autograd, forward
def forward(___ctx, ___kernel, ___from, _result, __fn, type, _____debug__, *___rest):
    ___result = ___kernel(___from, _result, __fn, type, _____debug__, *___rest)
    ____, ___needs_from, ___needs__result, ____, ____, ____, *___needs_rest, = ___ctx._customops_raw_flags
    ___like = ___metadata if ___type(___kernel) is ___partial else ___facts
    ___ctx._customops_expected = (___like(___from) if ___needs_from else None, ___like(_result) if ___needs__result else None, None, None, None, *(None,) * ___len(___rest))
    ___ctx._customops_flags = ___ctx._customops_raw_flags
    return ___result

# Autograd, backward
def backward(___ctx, *___grads):
    ___seen = ___ctx
    if ___ctx._customops_hooked:
        ___seen = ___unpacked_once(___ctx)
    if ___ctx._customops_untracked is not None and ___may_be_differentiated():
        ___seen = ___guarded(___ctx, ___op)
    try:
        if ___autocast_is_on():
            ___result = ___call_without_autocast(___fn, ___seen, *___grads)
        else:
            ___result = ___fn(___seen, *___grads)
    except ___AttributeError as ___error:
        ___ctx._customops_missing(___error)
        raise
    ___likes = ___ctx._customops_expected
    if ___type(___result) is ___tuple and ___len(___result) in (___len(___likes), 6):
        ___grad_from, ___grad__result, ___grad___fn, ___grad_type, ___grad___debug__, ___grad_await, = (*___result, None)[:6]
        ___like_from, ___like__result, ___like___fn, ___like_type, ___like___debug__, ___like_await, = (*___likes, ___left_out)[:6]
        if ((___like_from is None or ___like_from == (___grad_from.shape, ___grad_from.dtype, ___grad_from.device)) if ___isinstance(___grad_from, ___Tensor) else ___grad_from is ___like_from) and ((___like__result is None or ___like__result == (___grad__result.shape, ___grad__result.dtype, ___grad__result.device)) if ___isinstance(___grad__result, ___Tensor) else ___grad__result is ___like__result) and ___grad___fn is None and ___grad_type is None and ___grad___debug__ is None and ___grad_await is None:
            return None, *(___grad_from, ___grad__result, ___grad___fn, ___grad_type, ___grad___debug__, ___grad_await)[:___len(___likes)]
    ___none_allowed = ___any(grad is None for grad in ___grads)
    return None, *___check(___result, ___likes, none_allowed=___none_allowed)
