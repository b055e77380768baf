# (Tensor x, Tensor(a!)? seen) -> Tensor

# Autograd
def autograd(_keyset, /, x, seen):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (((x is not None and x.requires_grad) or (seen is not None and seen.requires_grad)) and _is_grad_enabled()):
            _increment_version(_tensors_in((seen,)))
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, seen)
            elif _is_grad_enabled():
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, seen)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, seen)
            if not _isinstance(_result, _Tensor):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not (
                        (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
                    )
                    or _result is x
                    or _result is seen
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((x, seen), (_result,)):
                raise _alias_error(_result, _fn, (x, seen), {})
            return _result
    return _general(_keyset, _current, (x, seen), {})

# CompositeExplicitAutograd
def kernel(x, seen):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, seen)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, seen)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, seen)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is x
            or _result is seen
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, seen), (_result,)):
        raise _alias_error(_result, _fn, (x, seen), {})
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, seen):
    _increment_version(_tensors_in((seen,)))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, seen)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, seen)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, seen)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is x
            or _result is seen
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, seen), (_result,)):
        raise _alias_error(_result, _fn, (x, seen), {})
    return _result
