# (Tensor(a!) x, Tensor y, float alpha=1.0) -> Tensor(a!)
# tags=Tag.inplace

# Autograd
def autograd(_keyset, /, x, y, *_rest):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (((x is not None and x.requires_grad) or (y is not None and y.requires_grad)) and _is_grad_enabled()):
            return _current.direct(x, y, *_rest)
    return _general(_keyset, _current, (x, y, *_rest), {})

# CompositeExplicitAutograd
def kernel(x, y, alpha=_default_2):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y, alpha)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y, alpha)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y, alpha)
    if _result is not x:
        raise _result_error(_result, _fn)
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, y, alpha=_default_2):
    if x is not None:
        _increment_version((x,))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y, alpha)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y, alpha)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y, alpha)
    if _result is not x:
        raise _result_error(_result, _fn)
    return _result
