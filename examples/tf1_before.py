"""Train a linear model with TensorFlow 1, a parameter server and two workers.

Start it three times: tf1_before.py ps 0, worker 0 and worker 1.
"""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
addresses = [f"localhost:{port}" for port in (2222, 2223, 2224)]
cluster = tf.train.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
job, task = sys.argv[1], int(sys.argv[2])
server = tf.train.Server(cluster, job_name=job, task_index=task)
if job == "ps":
    server.join()  # does not return: the process must be killed

workers = cluster.num_tasks("worker")
device = tf.train.replica_device_setter(
    worker_device=f"/job:worker/task:{task}", cluster=cluster
)
with tf.device(device):
    inputs = tf.placeholder(tf.float32, [None, 8])
    targets = tf.placeholder(tf.float32, [None])
    w = tf.get_variable("w", [8], initializer=tf.zeros_initializer())
    b = tf.get_variable("b", [], initializer=tf.zeros_initializer())
    error = tf.linalg.matvec(inputs, w) + b - targets
    loss = tf.reduce_mean(tf.square(error))
    step = tf.train.get_or_create_global_step()
    opt = tf.train.SyncReplicasOptimizer(
        tf.train.AdamOptimizer(0.05), workers, total_num_replicas=workers
    )
    train = opt.minimize(loss, global_step=step)

rng = np.random.default_rng(task)
hooks = [opt.make_session_run_hook(task == 0), tf.train.StopAtStepHook(last_step=200)]
with tf.train.MonitoredTrainingSession(
    server.target,
    is_chief=task == 0,
    checkpoint_dir="tf1-checkpoints",
    save_checkpoint_steps=100,
    hooks=hooks,
    stop_grace_period_secs=2,
) as session:
    while not session.should_stop():
        x = rng.normal(size=(32, 8)).astype(np.float32)
        feed = {inputs: x, targets: x.sum(1) + 2}
        value, number, _ = session.run([loss, step, train], feed)
        if task == 0 and number % 20 == 0:
            print(f"step {number}: loss {value:.4f}")
