# (SymInt[] size, *, Device device) -> Tensor
# no backward

# Autograd
def autograd(_keyset, /, size, **_named):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not False:
            return _current.direct(size, **_named)
    return _general(_keyset, _current, (size,), _named)

# CompositeExplicitAutograd
def kernel(size, *, device):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, size, device=device)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(size, device=device)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(size, device=device)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    return _result
