# MLX 0.32.4: mx.fast.gated_delta_update rounds a float64 state that comes in to float32, and returns float64.
import mlx.core as mx

mx.set_default_device(mx.cpu)
ones, decay, beta = mx.ones((1, 1, 1, 1), mx.float64), mx.ones((1, 1, 1), mx.float64), mx.zeros((1, 1, 1), mx.float64)
state = mx.full((1, 1, 1, 1), 1 + 1e-10, mx.float64)
print(mx.fast.gated_delta_update(ones, ones, ones, decay, beta, state)[1].item() - 1)  # nothing decays or is written: 1e-10
