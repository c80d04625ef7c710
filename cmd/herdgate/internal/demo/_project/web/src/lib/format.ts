/** Shows cents as euros. */
export function euros(cents: number): string {
  return `${(cents / 100).toFixed(2)} EUR`;
}

/** Turns an amount of the old store into cents. */
export function toCents(amount: number): number {
  return Math.round(amount * 100);
}
