//! Tests of the definitions: invariants of their schemas, and their rules with valid and invalid objects.

mod invariants;
mod rules;
