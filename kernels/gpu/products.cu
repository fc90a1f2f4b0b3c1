// Sums of products, see the CPU's products.py. A thread computes an element of the result, and adds in the CPU's order.

// Layers of a small convolutional network.

DEVICE Real leaky(Real sum, Real slope, Real gate) { return gate < 0 ? product(sum, slope) : sum; }

// Without a gate the sum is the gate.
KERNEL conv_halve(
    const Real* values, i64 inputs, const float* weights, const float* bias, double slope, const Real* gate, Real* out,
    i64 outputs, i64 places) {
  for (const i64 j : grid_stride(outputs * places)) {
    const i64 o = j / places, t = j % places;
    Real sum = (Real)bias[o];
    for (i64 c = 0; c < inputs; ++c) {
      const Real* input = values + 2 * (c * places + t);
      const float* taps = weights + 3 * (o * inputs + c);
      sum += product((Real)taps[0], t > 0 ? input[-1] : (Real)0);
      sum += product((Real)taps[1], input[0]);
      sum += product((Real)taps[2], input[1]);
    }
    out[j] = leaky(sum, (Real)slope, gate ? gate[j] : sum);
  }
}

KERNEL conv_double(
    const Real* values, i64 inputs, const float* weights, const float* bias, double slope, const Real* gate, Real* out,
    i64 outputs, i64 places) {
  for (const i64 j : grid_stride(outputs * places)) {
    const i64 o = j / places, t = j % places / 2;
    const bool odd = j % places % 2;
    Real sum = (Real)bias[o];
    for (i64 c = 0; c < inputs; ++c) {
      const Real* input = values + c * (places / 2) + t;
      const float* taps = weights + 3 * (c * outputs + o);
      if (odd) {
        sum += product((Real)taps[2], input[0]);
        sum += product((Real)taps[0], t + 1 < places / 2 ? input[1] : (Real)0);
      } else {
        sum += product((Real)taps[1], input[0]);
      }
    }
    out[j] = leaky(sum, (Real)slope, gate ? gate[j] : sum);
  }
}

KERNEL conv_mix(
    const Real* values, i64 inputs, const float* weights, const float* bias, Real* out, i64 outputs, i64 places) {
  for (const i64 j : grid_stride(outputs * places)) {
    const i64 o = j / places, t = j % places;
    Real sum = (Real)bias[o];
    for (i64 c = 0; c < inputs; ++c) sum += product((Real)weights[o * inputs + c], values[c * places + t]);
    out[j] = sum;
  }
}
