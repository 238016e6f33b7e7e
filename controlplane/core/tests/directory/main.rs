//! Tests of the core through its public interface: models of budgets, directory and followers, and its size and speed.

mod budget_model;
mod directory_model;
mod follower_model;
mod lookup_order;
mod scale;
