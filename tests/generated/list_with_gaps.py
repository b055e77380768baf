# (Tensor?[] xs) -> (Tensor, Tensor[])

# Autograd
def autograd(_keyset, /, xs):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (_any_requires_grad(xs) and _is_grad_enabled()):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, xs)
            elif _is_grad_enabled():
                _set_grad_enabled(False)
                try:
                    _result = _fn(xs)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(xs)
            if not (_type(_result) is _tuple and _len(_result) == 2 and _isinstance(_result[0], _Tensor) and (_type(_result[1]) is _list and _set(_map(_type, _result[1])) <= _tensor_types)):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not _all(_map(_is_own, _map(_storage, (_result[0], *(_result[1] or ())))))
                    or _any_alias((xs,), {}, (_result[0], _result[1]))
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((xs,), (_result[0], _result[1])):
                raise _alias_error(_result, _fn, (xs,), {})
            return _result
    return _general(_keyset, _current, (xs,), {})

# CompositeExplicitAutograd
def kernel(xs):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, xs)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(xs)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(xs)
    if not (_type(_result) is _tuple and _len(_result) == 2 and _isinstance(_result[0], _Tensor) and (_type(_result[1]) is _list and _set(_map(_type, _result[1])) <= _tensor_types)):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not _all(_map(_is_own, _map(_storage, (_result[0], *(_result[1] or ())))))
            or _any_alias((xs,), {}, (_result[0], _result[1]))
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((xs,), (_result[0], _result[1])):
        raise _alias_error(_result, _fn, (xs,), {})
    return _result
