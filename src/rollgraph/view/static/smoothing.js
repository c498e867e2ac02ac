// What is done to the numbers of a curve before they are drawn.

/** Exponential moving average whose first values are not pulled towards zero; gaps stay gaps. */
export function smooth(values, weight) {
  if (weight <= 0) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** A logarithmic axis has no place for zero and below. */
export function positive(values) {
  return values.map((value) => (value > 0 ? value : null));
}

/** Running sums over layers: the upper edge of each layer of a stacked chart, the last one being the total. */
export function stack(layers) {
  const edges = [];
  for (const layer of layers) {
    const below = edges.at(-1);
    edges.push(layer.map((value, index) => (value ?? 0) + (below ? below[index] : 0)));
  }
  return edges;
}
