# (Tensor?[] xs) -> (Tensor, Tensor[])

# Autograd
def autograd(_keyset, /, xs):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and _any_requires_grad(xs)):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, xs)
            elif _records:
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
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, xs)
            except _errors as _error:
                _node.explain(_error)
                raise
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

# Autograd, apply
def apply(_kernel, xs):
    _outcome = _Outcome()
    _result = _function(_kernel, _outcome, *xs)
    return _unflatten((_result if _isinstance(_result, _tuple) else (_result,)), _outcome.lengths)[:2]

# Autograd, forward
def forward(_ctx, _kernel, _outcome, *_flat):
    xs = _flat[0:]
    _result = _kernel(_list(xs))
    _result = (_result[0], _list(_result[1]))
    _needs = _ctx._customops_raw_flags[2:]
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = ([_like(x) if flag else None for x, flag in _zip(xs, _needs[0:])] if False in _needs[0:] else [*_map(_like, xs)],)
    _finish(_ctx, _flat, _result)
    _ctx._customops_flags = _ctx._customops_raw_flags
    _result, _outcome.lengths = _flatten(_result, (False, True))
    _ctx._customops_outputs = _outcome.lengths
    return _result

# Autograd, backward
def backward(_ctx, *_grads):
    _grads = _unflatten(_grads, _ctx._customops_outputs)
    if _ctx._customops_zeros is not None:
        _grads = _tuple(_map(_materialize_zeros, _grads, _ctx._customops_zeros))
    _seen = _ctx
    if _ctx._customops_hooked:
        _seen = _unpacked_once(_ctx)
    if _ctx._customops_untracked is not None and _may_be_differentiated():
        _seen = _guarded(_ctx, _op)
    try:
        if _autocast_is_on():
            _result = _call_without_autocast(_fn, _seen, *_grads)
        else:
            _result = _fn(_seen, *_grads)
    except _AttributeError as _error:
        _ctx._customops_missing(_error)
        raise
    _likes = _ctx._customops_expected
    if _type(_result) is _tuple and _len(_result) == 1:
        _grad_xs, = _result
        _like_xs, = _likes
        if _grad_xs is None:
            _grad_xs = _none_for_each(_like_xs)
        if _list_fits(_grad_xs, _like_xs):
            return None, None, *_grad_xs
    _none_allowed = _any(grad is None for grad in _flat_items(_grads))
    return None, None, *_check(_result, _likes, none_allowed=_none_allowed)
