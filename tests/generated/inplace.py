# (Tensor(a!) x, Tensor y, float alpha=1.0) -> Tensor(a!)
# tags=Tag.inplace

# Autograd
def autograd(_keyset, /, x, y, alpha=_default_2):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and ((x is not None and x.requires_grad) or (y is not None and y.requires_grad))):
            if x is not None:
                _increment_version((x,))
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, y, alpha)
            elif _records:
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
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, y, *_without_defaults((alpha,), (_default_2,)))
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x, y, *_without_defaults((alpha,), (_default_2,))), {})

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

# ADInplaceOrView
def ad_inplace_or_view(_keyset, /, x, y, alpha=_default_2):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if x is not None:
            _increment_version((x,))
        _fn = _current.fn
        if _autocast_is_on():
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
    return _general(_keyset, (x, y, *_without_defaults((alpha,), (_default_2,))), {})

# Autograd, apply
def apply(_kernel, x, y, *_rest):
    _passed = 2 + _len(_rest)
    alpha, = (*_rest, None)[:1]
    _outcome = _Outcome()
    _result = _function(_kernel, _outcome, _passed, x, y, alpha)
    if _outcome.mutated:
        _attach_graph(_outcome, _result)
    return _unflatten((_result if _isinstance(_result, _tuple) else (_result,)), _outcome.lengths)[0]

# Autograd, forward
def forward(_ctx, _kernel, _outcome, _passed, x, y, alpha):
    _flat = (x, y, alpha)
    _inputs = {0: x, 1: y, 2: alpha}
    _originals, _dirty = _mutation.begin(_inputs, _flat)
    with _mutation.recorded(_dirty):
        _result = _kernel(*(x, y, alpha)[:_passed])
    _result = x
    _outputs = _mutation.end(_ctx, _outcome, _inputs, (_result,), _dirty)
    x = _inputs[0]
    y = _inputs[1]
    alpha = _inputs[2]
    __, __, __, _needs_x, _needs_y, __, = _ctx._customops_raw_flags
    _like = _metadata
    _ctx._customops_expected = (_like(x) if _needs_x else None, _like(y) if _needs_y else None, _left_out if _passed <= 2 else None)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _mutation.flatten_outputs(_ctx, _outcome, _outputs)

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
    if _type(_result) is _tuple and _len(_result) == 3:
        _grad_x, _grad_y, _grad_alpha, = _result
        _like_x, _like_y, _like_alpha, = _likes
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x) and ((_like_y is None or _like_y == (_grad_y.shape, _grad_y.dtype, _grad_y.device)) if _isinstance(_grad_y, _Tensor) else _grad_y is _like_y) and _grad_alpha is None:
            return None, None, None, _grad_x, _grad_y, _grad_alpha
    _none_allowed = _any(grad is None for grad in _grads)
    return None, None, None, *_check(_result, _likes, none_allowed=_none_allowed)
