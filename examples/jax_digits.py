"""Train a small network on handwritten digits, averaging gradients over the ranks.

mpiexec -n 4 python examples/jax_digits.py
"""

import jax
import jax.numpy as jnp
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import hpcaccum.jax

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
images, labels = load_digits(return_X_y=True)
images = jnp.asarray(images / 16, jnp.float32)
mine, test = slice(rank, 1500, size), slice(1500, None)  # each rank has its own images


def scores(params, x):
    hidden = jax.nn.relu(x @ params["hidden"] + params["biases"])
    return hidden @ params["out"]


def loss(params, x, y):
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(params, x), y)
    return losses.mean()


@jax.jit
def step(params, state):
    value, grads = jax.value_and_grad(loss)(params, images[mine], labels[mine])
    updates, state = rule.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


first, second = jax.random.split(jax.random.key(0))  # the same on all ranks
params = {
    "hidden": jax.random.normal(first, (64, 32)) / 8,
    "biases": jnp.zeros(32),
    "out": jax.random.normal(second, (32, 10)) / 6,
}
rule = optax.chain(hpcaccum.jax.average(), optax.adam(0.02))
state = rule.init(params)
for number in range(60):
    params, state, value = step(params, state)
    if rank == 0 and number % 20 == 0:
        print(f"step {number}: loss {value:.3f} of rank 0's images")
if rank == 0:
    right = scores(params, images[test]).argmax(axis=1) == labels[test]
    print(f"test accuracy {right.mean():.1%}")
