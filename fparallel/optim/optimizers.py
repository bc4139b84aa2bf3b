"""The optimizers: chains of transformations under their usual names."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fparallel.optim.adaptive import scale_by_adam
from fparallel.optim.base import GradientTransformation, ScalarOrSchedule, Tree
from fparallel.optim.combining import chain
from fparallel.optim.decay import add_decayed_weights
from fparallel.optim.errors import OptimError
from fparallel.optim.momentum import trace
from fparallel.optim.scaling import scale_by_learning_rate
from fparallel.optim.signed import scale_by_lion

__all__ = ["adam", "adamw", "lion", "sgd"]


def sgd(
    learning_rate: ScalarOrSchedule, momentum: float | None = None, nesterov: bool = False
) -> GradientTransformation:
    r"""Stochastic gradient descent, with momentum if asked for.

    .. math::
        m_t = g_t + \mu\, m_{t-1}, \qquad \theta_t = \theta_{t-1} - \alpha_t\, m_t

    with :math:`g_t + \mu\, m_t` in place of :math:`m_t` for ``nesterov``. The same as ``torch.optim.SGD``
    with ``dampening=0`` and ``optax.sgd``.

    Args:
        learning_rate: :math:`\alpha`, a number or a schedule.
        momentum: :math:`\mu`. ``None``: no momentum and no state for it.
        nesterov: whether the momentum looks one step ahead.

    Raises:
        OptimError: for ``nesterov`` without ``momentum``.

    References:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.

    >>> import torch
    >>> from fparallel.optim import apply_updates
    >>> tx = sgd(0.1, momentum=0.5)
    >>> params = torch.tensor([1.0])
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     updates, state = tx.update(torch.tensor([1.0]), state, params)
    ...     params = apply_updates(params, updates)
    ...     print(params)
    tensor([0.9000])
    tensor([0.7500])
    """
    if momentum is None:
        if nesterov:
            raise OptimError("nesterov looks ahead along a momentum: there is none", fix="give a momentum")
        return chain(scale_by_learning_rate(learning_rate))
    return chain(trace(momentum, nesterov), scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
) -> GradientTransformation:
    r"""Adam: each entry of the gradient, rescaled by its own root mean square.

    .. math::
        \theta_t = \theta_{t-1} - \alpha_t\, u_t

    with :math:`u_t` of :func:`scale_by_adam`. The same as ``torch.optim.Adam`` and ``optax.adam`` with the
    same defaults; weight decay is :func:`adamw`'s.

    Args:
        learning_rate: :math:`\alpha`, a number or a schedule.
        b1: the decay of the mean gradient.
        b2: the decay of the mean square.
        eps: added to the root mean square.
        eps_root: added under the root; only needed to differentiate through the update.

    References:
        Kingma and Ba, Adam: A Method for Stochastic Optimization, `arXiv:1412.6980
        <https://arxiv.org/abs/1412.6980>`_.

    >>> import torch
    >>> tx = adam(0.01)
    >>> tx.update(torch.tensor([5.0, -0.2]), tx.init(torch.zeros(2)))[0]
    tensor([-0.0100,  0.0100])
    """
    return chain(scale_by_adam(b1, b2, eps, eps_root), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float | Tensor = 1e-2,
    mask: Tree | Callable[[Tree], Tree] | None = None,
) -> GradientTransformation:
    r"""Adam with decoupled weight decay.

    .. math::
        \theta_t = \theta_{t-1} - \alpha_t\, (u_t + \lambda\, \theta_{t-1})

    with :math:`u_t` of :func:`scale_by_adam`. As in torch and optax the decay is multiplied by the learning
    rate, schedule included.

    Args:
        learning_rate: :math:`\alpha`, a number or a schedule.
        b1: the decay of the mean gradient.
        b2: the decay of the mean square.
        eps: added to the root mean square.
        eps_root: added under the root; only needed to differentiate through the update.
        weight_decay: :math:`\lambda`. The default is torch's 1e-2; optax's is 1e-4.
        mask: which leaves are decayed, a tree of bools or a function from the parameters to one (see
            :func:`add_decayed_weights`). ``None``: all, biases and norms included, as in torch and optax.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, `arXiv:1711.05101
        <https://arxiv.org/abs/1711.05101>`_.

    Decaying matrices only:

    >>> import torch
    >>> from fparallel import tree
    >>> tx = adamw(0.01, weight_decay=0.1, mask=lambda params: tree.map(lambda p: p.ndim >= 2, params))
    >>> params = {"bias": torch.tensor([10.0]), "kernel": torch.tensor([[10.0]])}
    >>> grads = {"bias": torch.tensor([0.5]), "kernel": torch.tensor([[0.5]])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'bias': tensor([-0.0100]), 'kernel': tensor([[-0.0200]])}
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float | Tensor = 1e-3,
    mask: Tree | Callable[[Tree], Tree] | None = None,
) -> GradientTransformation:
    r"""Lion: steps of one size per entry, in the direction of the sign of the momentum.

    .. math::
        \theta_t = \theta_{t-1} - \alpha_t\, (u_t + \lambda\, \theta_{t-1})

    with :math:`u_t` of :func:`scale_by_lion`. The paper advises a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay as many times larger.

    Args:
        learning_rate: :math:`\alpha`, a number or a schedule.
        b1: the share of the momentum in the update.
        b2: the decay of the momentum.
        weight_decay: :math:`\lambda`. The default is optax's 1e-3; torch has no Lion.
        mask: which leaves are decayed, as for :func:`adamw`.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, `arXiv:2302.06675
        <https://arxiv.org/abs/2302.06675>`_.

    >>> import torch
    >>> tx = lion(0.01, weight_decay=0.0)
    >>> params = torch.tensor([1.0, 1.0])
    >>> tx.update(torch.tensor([5.0, -0.2]), tx.init(params), params)[0]
    tensor([-0.0100,  0.0100])
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
