# (Tensor x, *, Tensor(a!) u, Tensor(b!) v) -> (Tensor(a!), Tensor(b!))
# tags=Tag.out, no backward

# Autograd
def autograd(_keyset, /, x, **_named):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (_any_requires_grad(x, **_named) and _is_grad_enabled()):
            return _current.direct(x, **_named)
    return _general(_keyset, _current, (x,), _named)

# CompositeExplicitAutograd
def kernel(x, *, u, v):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, u=u, v=v)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, u=u, v=v)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, u=u, v=v)
    if not _isinstance(_result, _sequences) or _len(_result) != 2 or _result[0] is not u or _result[1] is not v:
        raise _result_error(_result, _fn)
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, *, u, v):
    _increment_version(_tensors_in((u, v)))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, u=u, v=v)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, u=u, v=v)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, u=u, v=v)
    if not _isinstance(_result, _sequences) or _len(_result) != 2 or _result[0] is not u or _result[1] is not v:
        raise _result_error(_result, _fn)
    return _result
