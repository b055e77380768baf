# (Tensor a, Tensor b, Tensor c, Tensor d) -> Tensor

# Autograd
def autograd(_keyset, /, a, b, c, d):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and _any_requires_grad(a, b, c, d)):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, a, b, c, d)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(a, b, c, d)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(a, b, c, d)
            if not _isinstance(_result, _Tensor):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not (
                        (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
                    )
                    or _result is a
                    or _result is b
                    or _result is c
                    or _result is d
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((a, b, c, d), (_result,)):
                raise _alias_error(_result, _fn, (a, b, c, d), {})
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, a, b, c, d)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (a, b, c, d), {})

# CompositeExplicitAutograd
def kernel(a, b, c, d):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, a, b, c, d)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(a, b, c, d)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(a, b, c, d)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is a
            or _result is b
            or _result is c
            or _result is d
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((a, b, c, d), (_result,)):
        raise _alias_error(_result, _fn, (a, b, c, d), {})
    return _result

# Autograd, forward
def forward(_ctx, _kernel, a, b, c, d):
    _result = _kernel(a, b, c, d)
    __, _needs_a, _needs_b, _needs_c, _needs_d, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(a) if _needs_a else None, _like(b) if _needs_b else None, _like(c) if _needs_c else None, _like(d) if _needs_d else None)
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
    if _type(_result) is _tuple and _len(_result) == 4:
        _grad_a, _grad_b, _grad_c, _grad_d, = _result
        _like_a, _like_b, _like_c, _like_d, = _likes
        if ((_like_a is None or _like_a == (_grad_a.shape, _grad_a.dtype, _grad_a.device)) if _isinstance(_grad_a, _Tensor) else _grad_a is _like_a) and ((_like_b is None or _like_b == (_grad_b.shape, _grad_b.dtype, _grad_b.device)) if _isinstance(_grad_b, _Tensor) else _grad_b is _like_b) and ((_like_c is None or _like_c == (_grad_c.shape, _grad_c.dtype, _grad_c.device)) if _isinstance(_grad_c, _Tensor) else _grad_c is _like_c) and ((_like_d is None or _like_d == (_grad_d.shape, _grad_d.dtype, _grad_d.device)) if _isinstance(_grad_d, _Tensor) else _grad_d is _like_d):
            return None, _grad_a, _grad_b, _grad_c, _grad_d
    _none_allowed = _any(grad is None for grad in _grads)
    return None, *_check(_result, _likes, none_allowed=_none_allowed)
