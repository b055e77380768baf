# (Tensor(a!) x, Tensor(b!)[] ys) -> Tensor

# Autograd
def autograd(_keyset, /, x, ys):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (_any_requires_grad(x, ys) and _is_grad_enabled()):
            _increment_version(_tensors_in((x, ys)))
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, ys)
            elif _is_grad_enabled():
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, ys)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, ys)
            if not _isinstance(_result, _Tensor):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not _all(_map(_is_own, _map(_storage, (_result,))))
                    or _any_alias((x, ys), {}, (_result,))
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((x, ys), (_result,)):
                raise _alias_error(_result, _fn, (x, ys), {})
            return _result
    return _general(_keyset, _current, (x, ys), {})

# CompositeExplicitAutograd
def kernel(x, ys):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, ys)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, ys)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, ys)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not _all(_map(_is_own, _map(_storage, (_result,))))
            or _any_alias((x, ys), {}, (_result,))
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, ys), (_result,)):
        raise _alias_error(_result, _fn, (x, ys), {})
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, ys):
    _increment_version(_tensors_in((x, ys)))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, ys)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, ys)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, ys)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not _all(_map(_is_own, _map(_storage, (_result,))))
            or _any_alias((x, ys), {}, (_result,))
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, ys), (_result,)):
        raise _alias_error(_result, _fn, (x, ys), {})
    return _result
