# (Tensor(a!) x, Tensor y) -> ()

# Autograd
def autograd(_keyset, /, x, y):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (((x is not None and x.requires_grad) or (y is not None and y.requires_grad)) and _is_grad_enabled()):
            if x is not None:
                _increment_version((x,))
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, y)
            elif _is_grad_enabled():
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, y)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, y)
            if _result is not None:
                _result = _structure(_result, _fn)
            return _result
    return _general(_keyset, _current, (x, y), {})

# CompositeExplicitAutograd
def kernel(x, y):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y)
    if _result is not None:
        _result = _structure(_result, _fn)
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, y):
    if x is not None:
        _increment_version((x,))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y)
    if _result is not None:
        _result = _structure(_result, _fn)
    return _result
