# (Tensor x) -> Tensor
# once_differentiable=True

# Autograd
def autograd(_keyset, /, x):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and x.requires_grad):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x)
            if not _isinstance(_result, _Tensor):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not (
                        (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
                    )
                    or _result is x
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((x,), (_result,)):
                raise _alias_error(_result, _fn, (x,), {})
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x,), {})

# CompositeExplicitAutograd
def kernel(x):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is x
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x,), (_result,)):
        raise _alias_error(_result, _fn, (x,), {})
    return _result

# Autograd, forward
def forward(_ctx, _kernel, x):
    _result = _kernel(x)
    __, _needs_x, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(x) if _needs_x else None,)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _result

# Autograd, backward
def backward(_ctx, *_grads):
    _seen = _ctx
    if _ctx._customops_hooked:
        _seen = _unpacked_once(_ctx)
    try:
        if _autocast_is_on():
            _result = _call_without_autocast(_fn, _seen, *_grads)
        else:
            _result = _fn(_seen, *_grads)
    except _AttributeError as _error:
        _ctx._customops_missing(_error)
        raise
    _likes = _ctx._customops_expected
    if _type(_result) is _tuple and _len(_result) == 1:
        _grad_x, = _result
        _like_x, = _likes
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x):
            return None, _grad_x
    _none_allowed = _any(grad is None for grad in _grads)
    return None, *_check(_result, _likes, none_allowed=_none_allowed)
