# MLX 0.32.4: mx.fast.gated_delta_update rounds float32 decays to the dtype of q, so that 16-bit calls forget at another rate.
import mlx.core as mx

mx.random.seed(0)
q, k, v = (mx.random.normal((1, 64, 1, 32)) for _ in range(3))
k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
decay, beta, state = mx.full((1, 64, 1), 0.999), mx.zeros((1, 64, 1)), mx.ones((1, 1, 32, 32))
for dtype in (mx.float32, mx.float16, mx.bfloat16):  # beta is 0: the state is 0.999 ** 64 = 0.938 times what it was
    x = [y.astype(dtype) for y in (q, k, v)]
    print(dtype, mx.fast.gated_delta_update(*x, decay, beta, state)[1].mean().item())
