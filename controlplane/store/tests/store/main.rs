//! Tests of the stores: the contract of all of them, etcd with its faults, and leases.

mod auth;
mod authority;
mod conformance;
mod embedded;
mod etcd;
mod every_store;
mod lease_guard;
mod lease_model;
mod leases;
mod tls;
