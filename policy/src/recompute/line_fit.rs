//! Line through measurements, of which old ones count less.

/// Part by which earlier measurements lose weight with each new one, as in a moving average of 16.
const DECAY: f64 = 15.0 / 16.0;

/// Smallest variance of `x`, relative to its square, at which measurements determine a slope.
const SPREAD_MIN: f64 = 1e-3;

/// Weighted sums of the measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LineFit {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

/// Line that measurements with one `x` stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Without {
    /// Constant: the mean of `y`.
    Slope,
    /// Line through the origin.
    Intercept,
}

impl LineFit {
    /// Adds a measurement; all numbers are finite and at least 0, the weight is above 0.
    pub(super) fn add(&mut self, x: f64, y: f64, weight: f64) {
        for sum in [&mut self.weight, &mut self.x, &mut self.y, &mut self.xx, &mut self.xy] {
            *sum *= DECAY;
        }
        self.weight += weight;
        self.x += weight * x;
        self.y += weight * y;
        self.xx += weight * x * x;
        self.xy += weight * x * y;
    }

    /// Returns intercept and slope, both at least 0; `None` without measurements.
    pub(super) fn line(&self, without: Without) -> Option<(f64, f64)> {
        if self.weight <= 0.0 {
            return None;
        }
        let (constant, through_origin) = ((self.y / self.weight, 0.0), (0.0, self.xy / self.xx));
        let spread = self.weight * self.xx - self.x * self.x;
        if spread <= SPREAD_MIN * self.weight * self.xx {
            return Some(if without == Without::Intercept && self.xx > 0.0 {
                through_origin
            } else {
                constant
            });
        }
        let slope = (self.weight * self.xy - self.x * self.y) / spread;
        let intercept = (self.y - slope * self.x) / self.weight;
        Some(match (intercept >= 0.0, slope >= 0.0) {
            (true, true) => (intercept, slope),
            (true, false) => constant,
            (false, _) => through_origin,
        })
    }
}
