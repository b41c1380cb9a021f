"""Updates that make their gradients themselves: where the pass makes them, for a GPU. What they
compute there is in test_weight_update_gpu.py.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.fusion.shared.update_operators import FusedUpdate
from dlsys.fusion.weight_update import MOST_PRODUCTS
from dlsys.graph.node import Node, find_topo_sort
from fusion.test_gemm_epilogue import Network
from support.fusion import GPU
from support.fusion import fused as run_fusions
from support.graphs import operators, simplified, variable

FLOAT32 = np.float32


def grouped(fetches: Sequence[Node]) -> list[Node]:
    """The fetches as the pass gets them."""
    names = "cross_entropy", "gemm_epilogue", "mlp_head", "multi_tensor"
    return run_fusions(simplified(fetches), *names, target=GPU)


def fused(*fetches: Node) -> list[Node]:
    return run_fusions(grouped(fetches), "weight_update", target=GPU)


def updates(fetches: Sequence[Node]) -> list[Node]:
    return [node for node in find_topo_sort(fetches) if isinstance(node.op, FusedUpdate)]


def parameter(*shape: int, name: str = "p", seed: int = 0) -> ad.Parameter:
    value = np.random.default_rng(seed).integers(-4, 5, shape).astype(FLOAT32)
    return ad.Parameter(value, name)


class Layer:
    """The gradient aᵀ b of a weight (m, n), and that of a bias, the sums of a or b; a (k, m) and b
    (k, n) are fed.
    """

    def __init__(self, k: int, m: int, n: int, sums: str = "B", number: int = 0) -> None:
        self.sums = sums
        self.a, self.b = variable(f"a{number}", k, m), variable(f"b{number}", k, n)
        self.weight = parameter(m, n, name=f"w{number}", seed=number)
        gradients = [ad.matmul_op(self.a, self.b, trans_A=True)]
        self.parameters = [self.weight]
        if sums:
            of = self.a if sums == "A" else self.b
            gradients.append(ad.sum_op(of, axis=0))
            self.parameters.append(parameter(of.spec.shape[1], name=f"s{number}", seed=number))
        self.gradients = gradients

    @property
    def loss(self) -> Node:
        """What has these gradients, in one layout of a dense layer's weights or the other."""
        bias = self.parameters[1:]
        if self.sums == "A":
            return ad.sum_op(self.a * ad.linear_op(self.b, self.weight, *bias, trans_B=True))
        return ad.sum_op(self.b * ad.linear_op(self.a, self.weight, *bias))

    def feeds(self, step: int = 0) -> dict[Node, np.ndarray]:
        """Small integers, whose products and sums are exact in every order and precision."""
        rng = np.random.default_rng(step)
        return {x: rng.integers(-3, 4, x.spec.shape).astype(FLOAT32) for x in (self.a, self.b)}

    def update(self, lr: Node) -> list[Node]:
        return [ad.sgd_update_op(p, g, lr) for p, g in zip(self.parameters, self.gradients)]


def feeds_of(layers: Sequence[Layer], step: int = 0) -> dict[Node, np.ndarray]:
    return {x: value for layer in layers for x, value in layer.feeds(step).items()}


def trained(layers: Sequence[Layer], optimizer: optim.Optimizer) -> tuple[Node, list[ad.Parameter]]:
    """The step of an optimizer, and all that it changes."""
    loss = ad.sum_node_list([layer.loss for layer in layers])
    parameters = [p for layer in layers for p in layer.parameters]
    train = optimizer.minimize(loss, parameters)
    return train, [*parameters, *(state for _, state in optimizer.named_state())]


def sgd(*layers: Layer) -> Node:
    """A step at a rate of 1/2."""
    lr = ad.constant(FLOAT32(0.5), "lr")
    return ad.group_op(*(node for layer in layers for node in layer.update(lr)))


# One for each rule, smooth where gradients are small.
OPTIMIZERS: tuple[Callable[..., optim.Optimizer], ...] = (
    lambda **more: optim.SGD(0.25, **more),
    lambda **more: optim.SGD(0.25, momentum=0.5, nesterov=True, **more),
    lambda **more: optim.SGD(0.25, momentum=0.5, dampening=0.25, **more),
    lambda **more: optim.Adam(0.1, eps=0.1, **more),
    lambda **more: optim.RMSprop(0.1, eps=0.1, **more),
    lambda **more: optim.RMSprop(0.1, eps=0.1, centered=True, **more),
    lambda **more: optim.RMSprop(0.1, eps=0.1, momentum=0.5, **more),
    lambda **more: optim.RMSprop(0.1, eps=0.1, centered=True, momentum=0.5, **more),
    lambda **more: optim.Adagrad(0.1, eps=0.1, **more),
    lambda **more: optim.Lion(0.1, **more),
)


class Rewrites(unittest.TestCase):
    """That they happen, and only where they may."""

    def assert_becomes(self, fetches: Sequence[Node], *names: str) -> list[Node]:
        found = fused(*fetches)
        self.assertEqual(operators(found), sorted(names))
        return found

    def assert_left(self, fetches: Sequence[Node]) -> None:
        """Nothing happens."""
        before = operators(grouped(fetches))
        self.assertEqual(operators(fused(*fetches)), before)

    def test_a_training_step_is_two_kernels_and_a_counter(self) -> None:
        for options in ({}, {"transposed": True}, {"dense": True, "reduction": "sum"}):
            for batch in ((9,), (3, 4)):
                for widths in ((7, 6, 8, 5), (7, 5)):
                    with self.subTest(batch=batch, widths=widths, **options):
                        net = Network(batch, widths, **options)
                        train = optim.SGD(0.1).minimize(net.loss, net.parameters)
                        kind = "" if "dense" in options else "sparse_"
                        head = f"fused_{kind}mlp_head"
                        found = self.assert_becomes(
                            [net.loss, train], head, "matmul_sgd_update", "advance_step"
                        )
                        [node] = updates(found)
                        self.assertEqual(node.op.outputs, len(net.parameters))

    def test_every_rule(self) -> None:
        net = Network((9,), (7, 6, 5))
        for optimizer in OPTIMIZERS:
            with self.subTest(optimizer=optimizer):
                made = optimizer()
                rule = made.rule(made.options)[0].name
                found = fused(made.minimize(net.loss, net.parameters))
                self.assertEqual([x.op.name for x in updates(found)], [f"matmul_{rule}"])
                self.assertNotIn(rule, operators(found))

    def test_layers_without_a_bias(self) -> None:
        self.assert_becomes([sgd(Layer(9, 7, 5, ""))], "matmul_sgd_update")
        layers = [Layer(9, 7, 5, sums, k) for k, sums in enumerate(("", "A", "B"))]
        [node] = updates(self.assert_becomes([sgd(*layers)], "matmul_sgd_update"))
        self.assertEqual(node.attrs["sums"], ("", "A", "B"))
        self.assertEqual([x.name for x in node.inputs[:5]], ["w0", "w1", "w2", "s1", "s2"])

    def test_a_weight_of_another_shape(self) -> None:
        layer = Layer(9, 6, 8, "")
        w, lr = parameter(2, 3, 8), ad.constant(FLOAT32(0.5))
        gradient = ad.reshape_op(layer.gradients[0], (2, 3, 8))
        update = ad.sgd_update_op(w, gradient, lr)
        [found] = self.assert_becomes([update], "matmul_sgd_update")
        self.assertEqual(found.spec.shape, (2, 3, 8))

    def test_parameters_that_are_left_are_updated_as_before(self) -> None:
        layer, other = Layer(9, 7, 5), parameter(3)
        lr = ad.constant(FLOAT32(0.5))
        nodes = [*layer.update(lr), ad.sgd_update_op(other, ad.exp_op(other), lr)]
        found = self.assert_becomes(
            [ad.group_op(*nodes), nodes[2]], "exp", "matmul_sgd_update", "sgd_update"
        )
        self.assertEqual(found[1].op.name, "sgd_update")
        self.assertEqual(found[1].inputs[0].name, "p")

    def test_new_values_can_be_fetched_and_read(self) -> None:
        layer = Layer(9, 7, 5)
        weight, bias = layer.update(ad.constant(FLOAT32(0.5)))
        found = self.assert_becomes([weight * 2, bias], "matmul_sgd_update", "mul_const")
        [node] = updates(found)
        for value, index in ((found[0].inputs[0], 0), (found[1], 1)):
            self.assertEqual((value.inputs, value.attrs["index"]), ([node], index))

    def test_gradients_that_somebody_wants_are_made(self) -> None:
        layer = Layer(9, 7, 5)
        train = sgd(layer)
        for gradient in layer.gradients:
            self.assert_left([train, gradient])
            self.assert_left([train, ad.exp_op(gradient)])

    def test_a_gradient_of_two_parameters_is_made(self) -> None:
        layer, twin = Layer(9, 7, 5, ""), parameter(7, 5, name="twin")
        lr = ad.constant(FLOAT32(0.5))
        nodes = [ad.sgd_update_op(w, layer.gradients[0], lr) for w in (layer.weight, twin)]
        self.assert_left([ad.group_op(*nodes)])

    def test_a_weight_and_a_bias_of_two_updates(self) -> None:
        layer = Layer(9, 7, 5)
        nodes = [
            ad.sgd_update_op(p, g, ad.constant(FLOAT32(rate)))
            for p, g, rate in zip(layer.parameters, layer.gradients, (0.5, 0.25))
        ]
        self.assert_left([ad.group_op(*nodes)])

    def test_clipping_by_norm_reads_the_gradients(self) -> None:
        net = Network((9,), (7, 6, 5))
        for accumulate in (1, 2):
            optimizer = optim.SGD(0.1, clip_norm=1.0, accumulate=accumulate)
            train = optimizer.minimize(net.loss, net.parameters)
            names = [x.op.name for x in updates(fused(train))]
            self.assertEqual(names, ["matmul_accumulate_update"] * (accumulate - 1))

    def test_accumulation_takes_the_products(self) -> None:
        net = Network((9,), (7, 6, 5))
        optimizer = optim.Adam(0.1, accumulate=3, ema=0.9)
        self.assert_becomes(
            [optimizer.minimize(net.loss, net.parameters)],
            "fused_sparse_mlp_head", "matmul_accumulate_update", "adam_update",
            "average_update", "advance_step", "advance_step",
        )  # fmt: skip

    def test_factors_that_are_states_are_left_alone(self) -> None:
        layer, lr = Layer(9, 7, 5, ""), ad.constant(FLOAT32(0.5))
        other, flat = parameter(9, 7), parameter(63)
        for a in (other, ad.reshape_op(flat, (9, 7)), ad.assign_op(other, layer.a)):
            gradient = ad.matmul_op(a, layer.b, trans_A=True)
            self.assert_left([ad.sgd_update_op(layer.weight, gradient, lr)])

    def test_other_products_are_left_alone(self) -> None:
        a, b = variable("a", 7, 9), variable("b", 9, 5)
        w, lr = parameter(7, 5), ad.constant(FLOAT32(0.5))
        self.assert_left([ad.sgd_update_op(w, ad.matmul_op(a, b), lr)])
        late = ad.exp_op(ad.matmul_op(ad.transpose_op(a), b, trans_A=True))
        self.assert_left([ad.sgd_update_op(w, late, lr)])

    def test_another_dtype_is_left_alone(self) -> None:
        a, b = (variable(name, 9, n, dtype=np.float64) for name, n in (("a", 7), ("b", 5)))
        w = ad.Parameter(np.zeros((7, 5)), "w", dtype=np.float64)
        gradient = ad.matmul_op(a, b, trans_A=True)
        update = ad.sgd_update_op(w, gradient, ad.constant(np.float64(0.5)))
        self.assertEqual(run_fusions([update], "weight_update", target=GPU), [update])

    def test_products_that_are_too_large_are_left_alone(self) -> None:
        small, large = Layer(100, 70, 50), Layer(1000, 1000, 751, number=1)
        names = ["matmul_sgd_update", "matmul_sums", "sgd_update"]
        self.assert_becomes([sgd(small, large)], *names)
        self.assert_becomes([sgd(Layer(1000, 1000, 750))], "matmul_sgd_update")

    def test_a_launch_has_so_many_products_and_so_much_work(self) -> None:
        layers = [Layer(9, 7, 5, number=k) for k in range(MOST_PRODUCTS + 2)]
        found = updates(fused(sgd(*layers)))
        self.assertEqual([len(x.attrs["sums"]) for x in found], [MOST_PRODUCTS, 2])
        layers = [Layer(500, 1000, 1000, number=k) for k in range(3)]
        self.assertEqual(len(updates(fused(sgd(*layers)))), 3)

    def test_an_update_that_needs_another_ones_result_makes_no_cycle(self) -> None:
        first, second = Layer(9, 7, 5, ""), Layer(9, 7, 5, number=1)
        [new] = first.update(ad.constant(FLOAT32(0.5)))
        nodes = second.update(ad.sum_op(new))
        found = fused(ad.group_op(new, *nodes))  # a cycle would be refused by the sort
        self.assertEqual(len(updates(found)), 2)

    def test_convolutions_stay_in_the_plain_update(self) -> None:
        model = nn.LeNet5(seed=0)
        x = variable("x", 4, 28, 28)
        loss = ad.softmax_cross_entropy(model(x), variable("labels", 4, dtype=np.int64))
        found = fused(optim.SGD(0.1).minimize(loss, model.parameters()))
        [node] = updates(found)
        self.assertEqual([x.spec.shape for x in node.inputs[:3]], [(120, 400), (84, 120), (10, 84)])
        [plain] = [x for x in find_topo_sort(found) if x.op.name == "sgd_update"]
        self.assertEqual(plain.op.outputs, 4)

    def test_it_shows_its_body_and_its_line(self) -> None:
        layer = Layer(9, 7, 5)
        nodes = layer.update(ad.constant(FLOAT32(0.5)))
        [node] = updates(fused(*nodes))
        self.assertEqual(node.where, nodes[0].where)
        self.assertEqual(node.name, "matmul_sgd_update of 2")
        made = "matmul_sums(a0ᵀ, b0)"
        self.assertIn(f"body={made}[0]; {made}[1]", ad.text([node]))

    def test_the_users_graph_is_left_alone(self) -> None:
        net = Network((3, 4), (7, 6, 5))
        train = optim.SGD(0.1).minimize(net.loss, net.parameters)
        before = ad.text([train])
        fused(train)
        self.assertEqual(ad.text([train]), before)

    def test_its_operations_are_those_of_products_and_rule(self) -> None:
        [node] = updates(fused(sgd(Layer(9, 7, 5))))
        specs = [x.spec for x in node.inputs]
        self.assertEqual(node.op.cost(node, specs, specs[0]), 2 * 9 * 7 * 5 + 9 * 5 + 2 * 40)

    def test_checks_pass_over_what_rounding_decides(self) -> None:
        """The sign of a gradient that is all but zero moves a parameter by the whole rate."""
        for optimizer, chosen in (
            (optim.SGD(0.1, momentum=0.5), ()),
            (optim.Lion(0.1), (0, 1)),
            (optim.RMSprop(0.1, momentum=0.5), (0, 1, 4, 5)),
        ):
            [node] = updates(fused(trained([Layer(9, 7, 5)], optimizer)[0]))
            self.assertEqual(node.op.discrete_outputs, chosen)

    def test_the_numpy_form_is_that_of_products_and_rule(self) -> None:
        for optimizer in OPTIMIZERS:
            with self.subTest(optimizer=optimizer):
                layers = [Layer(9, 7, 5, "A"), Layer(4, 3, 2, "B", 1)]
                train, states = trained(layers, optimizer())
                [node] = updates(fused(train))
                given = {x.name: value for x, value in feeds_of(layers).items()}
                given |= {p.name: p.asnumpy() for p in states}
                arrays = [given.get(x.name, x.attrs.get("value")) for x in node.inputs]
                specs, made = [x.spec for x in node.inputs], list(node.spec)
                scratch = [np.empty(s.shape, s.dtype) for s in node.op.workspace(node, specs, made)]
                node.op.numpy(node, *arrays, *scratch)
                ad.Executor([train]).run(feeds_of(layers))
                changed = {p.name: p.asnumpy() for p in states}
                for k in node.op.writes:
                    np.testing.assert_array_equal(arrays[k], changed[node.inputs[k].name])
