# (Tensor x, Tensor y) -> (Tensor, Tensor)
# setup_context

# Autograd
def autograd(_keyset, /, x, y):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and ((x is not None and x.requires_grad) or (y is not None and y.requires_grad))):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, y)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, y)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, y)
            if not (_type(_result) is _tuple and _len(_result) == 2 and _isinstance(_result[0], _Tensor) and _isinstance(_result[1], _Tensor)):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not (
                        (_s := _result[0].untyped_storage()).resizable() and _uses(_s._cdata) == 2
                        and (_s := _result[1].untyped_storage()).resizable() and _uses(_s._cdata) == 2
                    )
                    or _result[0] is x
                    or _result[0] is y
                    or _result[1] is x
                    or _result[1] is y
                    or _result[0] is _result[1]
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((x, y), (_result[0], _result[1])):
                raise _alias_error(_result, _fn, (x, y), {})
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, y)
            except _errors as _error:
                _node.explain(_error)
                raise
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
    if not (_type(_result) is _tuple and _len(_result) == 2 and _isinstance(_result[0], _Tensor) and _isinstance(_result[1], _Tensor)):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result[0].untyped_storage()).resizable() and _uses(_s._cdata) == 2
                and (_s := _result[1].untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result[0] is x
            or _result[0] is y
            or _result[1] is x
            or _result[1] is y
            or _result[0] is _result[1]
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, y), (_result[0], _result[1])):
        raise _alias_error(_result, _fn, (x, y), {})
    return _result

# Autograd, forward
def forward(_ctx, _kernel, x, y):
    _result = _kernel(x, y)
    if _type(_result) is not _tuple:
        _result = _tuple(_result)
    _kept = _ctx.__dict__
    if _type(_kernel) is _partial and _transforms_active() or _autocast_is_on():
        _set_up(_ctx, (x, y), {}, _result)
    else:
        _callback(ctx=_ctx, inputs=(x, y), output=_result)
    _untracked = _ctx.non_differentiable
    for _value in _kept.values():
        if _type(_value) not in _no_tensors:
            _untracked = True
    for _saved in _ctx.to_save or ():
        if _saved is not x and _saved is not y and _saved is not _result[0] and _saved is not _result[1]:
            _untracked = True
    if _untracked:
        _record_untracked(_ctx, (x, y), (*(x, y), _result[0], _result[1]))
    if _ctx.to_save and _saved_tensors_hooks(True) is not None:
        _ctx._customops_hooked = True
    _finish(_ctx, (x, y), _result)
    __, _needs_x, _needs_y, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(x) if _needs_x else None, _like(y) if _needs_y else None)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _result

# Autograd, backward
def backward(_ctx, *_grads):
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
    if _type(_result) is _tuple and _len(_result) == 2:
        _grad_x, _grad_y, = _result
        _like_x, _like_y, = _likes
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x) and ((_like_y is None or _like_y == (_grad_y.shape, _grad_y.dtype, _grad_y.device)) if _isinstance(_grad_y, _Tensor) else _grad_y is _like_y):
            return None, _grad_x, _grad_y
    _none_allowed = _any(grad is None for grad in _grads)
    return None, *_check(_result, _likes, none_allowed=_none_allowed)
