# (Tensor[] xs, Tensor y) -> Tensor[]

# Autograd
def autograd(_keyset, /, xs, y):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (_any_requires_grad(xs, y) and _is_grad_enabled()):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, xs, y)
            elif _is_grad_enabled():
                _set_grad_enabled(False)
                try:
                    _result = _fn(xs, y)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(xs, y)
            if not (_type(_result) is _list and _set(_map(_type, _result)) <= _tensor_types):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not _all(_map(_is_own, _map(_storage, (*(_result or ()),))))
                    or _any_alias((xs, y), {}, (_result,))
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((xs, y), (_result,)):
                raise _alias_error(_result, _fn, (xs, y), {})
            return _result
    return _general(_keyset, _current, (xs, y), {})

# CompositeExplicitAutograd
def kernel(xs, y):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, xs, y)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(xs, y)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(xs, y)
    if not (_type(_result) is _list and _set(_map(_type, _result)) <= _tensor_types):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not _all(_map(_is_own, _map(_storage, (*(_result or ()),))))
            or _any_alias((xs, y), {}, (_result,))
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((xs, y), (_result,)):
        raise _alias_error(_result, _fn, (xs, y), {})
    return _result
