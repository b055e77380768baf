# (Tensor x, float by=1.0, SymInt n=2) -> Tensor

# Autograd
def autograd(_keyset, /, x, by=_default_1, n=_default_2):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and x.requires_grad):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, by, n)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, by, n)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, by, n)
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
                raise _alias_error(_result, _fn, (x, by, n), {})
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, *_without_defaults((by, n), (_default_1, _default_2)))
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x, *_without_defaults((by, n), (_default_1, _default_2))), {})

# CompositeExplicitAutograd
def kernel(x, by=_default_1, n=_default_2):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, by, n)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, by, n)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, by, n)
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
        raise _alias_error(_result, _fn, (x, by, n), {})
    return _result

# Autograd, forward
def forward(_ctx, _kernel, x, *_rest):
    _result = _kernel(x, *_rest)
    __, _needs_x, *_needs_rest, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(x) if _needs_x else None, *(None,) * _len(_rest))
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _result

# Autograd, backward
def backward(_ctx, *_grads):
    _seen = _ctx
    if _ctx._customops_hooked:
        _seen = _unpacked_once(_ctx)
    if _ctx._customops_untracked is not None and _may_be_differentiated():
        _seen = _guarded(_ctx, _op)
    try:
        if _autocast_is_on():
            _result = _call_without_autocast(_fn, _seen, *_grads)
        else:
            _result = _fn(_seen, *_grads)
    except _AttributeError as _error:
        _ctx._customops_missing(_error)
        raise
    _likes = _ctx._customops_expected
    if _type(_result) is _tuple and _len(_result) in (_len(_likes), 3):
        _grad_x, _grad_by, _grad_n, = (*_result, None, None)[:3]
        _like_x, _like_by, _like_n, = (*_likes, _left_out, _left_out)[:3]
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x) and _grad_by is None and _grad_n is None:
            return None, *(_grad_x, _grad_by, _grad_n)[:_len(_likes)]
    _none_allowed = _any(grad is None for grad in _grads)
    return None, *_check(_result, _likes, none_allowed=_none_allowed)
