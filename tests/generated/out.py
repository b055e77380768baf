# (Tensor x, *, Tensor(a!) out) -> Tensor(a!)
# tags=Tag.out, no backward

# Autograd
def autograd(_keyset, /, x, **_named):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (_any_requires_grad(x, **_named) and _is_grad_enabled()):
            return _current.direct(x, **_named)
    return _general(_keyset, _current, (x,), _named)

# CompositeExplicitAutograd
def kernel(x, *, out):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, out=out)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, out=out)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, out=out)
    if _result is not out:
        raise _result_error(_result, _fn)
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, *, out):
    if out is not None:
        _increment_version((out,))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, out=out)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, out=out)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, out=out)
    if _result is not out:
        raise _result_error(_result, _fn)
    return _result
