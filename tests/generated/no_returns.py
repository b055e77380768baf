# (Tensor x) -> ()
# no backward

# Autograd
def autograd(_keyset, /, x):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (x.requires_grad and _is_grad_enabled()):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x)
            elif _is_grad_enabled():
                _set_grad_enabled(False)
                try:
                    _result = _fn(x)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x)
            if _result is not None:
                _result = _structure(_result, _fn)
            return _result
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
    if _result is not None:
        _result = _structure(_result, _fn)
    return _result
