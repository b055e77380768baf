# (Tensor _result, Tensor __fn, int type, int len) -> Tensor

# Autograd
def autograd(___keyset, /, _result, __fn, type, len):
    ___current = ___fast_path.get(___keyset.raw_repr())
    if ___current is not None and ___forward_ad._current_level < 0:
        ___records = ___is_grad_enabled()
        if not (___records and ((_result is not None and _result.requires_grad) or (__fn is not None and __fn.requires_grad))):
            ___fn = ___current.fn
            if ___autocast_is_on():
                ___result = ___call_plainly(___fn, _result, __fn, type, len)
            elif ___records:
                ___set_grad_enabled(False)
                try:
                    ___result = ___fn(_result, __fn, type, len)
                finally:
                    ___set_grad_enabled(True)
            else:
                ___result = ___fn(_result, __fn, type, len)
            if not ___isinstance(___result, ___Tensor):
                ___result = ___structure(___result, ___fn)
            try:
                ___alias = (
                    not (
                        (___s := ___result.untyped_storage()).resizable() and ___uses(___s._cdata) == 2
                    )
                    or ___result is _result
                    or ___result is __fn
                )
            except ___RuntimeError:
                ___alias = True  # perhaps: a layout without a storage of its own
            if ___alias and ___share_memory((_result, __fn), (___result,)):
                raise ___alias_error(___result, ___fn, (_result, __fn, type, len), {})
            return ___result
        ___apply = ___node.apply
        if ___apply is not None:
            try:
                return ___apply(___current.direct, _result, __fn, type, len)
            except ___errors as ___error:
                ___node.explain(___error)
                raise
    return ___general(___keyset, ___current, (_result, __fn, type, len), {})

# CompositeExplicitAutograd
def kernel(_result, __fn, type, len):
    ___fn = ___current.fn
    if ___autocast_is_on() or ___is_excluded(___conjugate):
        ___result = ___call_plainly(___fn, _result, __fn, type, len)
    elif ___is_grad_enabled():
        ___set_grad_enabled(False)
        try:
            ___result = ___fn(_result, __fn, type, len)
        finally:
            ___set_grad_enabled(True)
    else:
        ___result = ___fn(_result, __fn, type, len)
    if not ___isinstance(___result, ___Tensor):
        ___result = ___structure(___result, ___fn)
    try:
        ___alias = (
            not (
                (___s := ___result.untyped_storage()).resizable() and ___uses(___s._cdata) == 2
            )
            or ___result is _result
            or ___result is __fn
        )
    except ___RuntimeError:
        ___alias = True  # perhaps: a layout without a storage of its own
    if ___alias and ___share_memory((_result, __fn), (___result,)):
        raise ___alias_error(___result, ___fn, (_result, __fn, type, len), {})
    return ___result

# Autograd, forward
def forward(___ctx, ___kernel, _result, __fn, type, len):
    ___result = ___kernel(_result, __fn, type, len)
    ___needs = ___ctx.needs_input_grad[1:]
    ___ctx.needs_input_grad = ___needs
    ___kept = ___ctx.__dict__
    if '_customops_materialize' in ___kept:
        ___finish(___ctx, (_result, __fn, type, len), (___result,))
    if not ___compares.is_on:
        ___kept['_customops_expected'] = (None,) * ___len(___needs)
    elif ___type(___kernel) is ___partial:
        ___kept['_customops_expected'] = (___metadata(_result) if ___needs[0] else None, ___metadata(__fn) if ___needs[1] else None, None, None)
    else:
        ___kept['_customops_expected'] = (___facts(_result) if ___needs[0] else None, ___facts(__fn) if ___needs[1] else None, None, None)
    return ___result

# Autograd, backward
def backward(___ctx, *___grads):
    ___seen = ___ctx
    if ___ctx._customops_hooked:
        ___seen = ___unpacked_once(___ctx)
    if ___ctx._customops_untracked is not None and ___may_be_differentiated():
        ___seen = ___guarded(___ctx, ___op)
    if ___autocast_is_on():
        ___result = ___call_without_autocast(___fn, ___seen, *___grads)
    else:
        ___result = ___fn(___seen, *___grads)
    ___likes = ___ctx._customops_expected
    if ___type(___result) is ___tuple and ___len(___result) == 4:
        ___grad__result, ___grad___fn, ___grad_type, ___grad_len, = ___result
        ___like__result, ___like___fn, ___like_type, ___like_len, = ___likes
        if ((___like__result is None or ___like__result == (___grad__result.shape, ___grad__result.dtype, ___grad__result.device)) if ___isinstance(___grad__result, ___Tensor) else ___grad__result is ___like__result) and ((___like___fn is None or ___like___fn == (___grad___fn.shape, ___grad___fn.dtype, ___grad___fn.device)) if ___isinstance(___grad___fn, ___Tensor) else ___grad___fn is ___like___fn) and ___grad_type is None and ___grad_len is None:
            ___was_right()
            return None, ___grad__result, ___grad___fn, ___grad_type, ___grad_len
    ___none_allowed = ___any(grad is None for grad in ___grads)
    return None, *___check(___result, ___likes, none_allowed=___none_allowed)
