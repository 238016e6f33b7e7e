//! Tests of whole simulated clusters: chaos with its deliberate flaws, and many agents at once.

mod chaos;
mod cores;
mod scale;
