//! Rights to frames.
//!
//! A right is a number with a type. Only the cache creates one, and its holder returns it once:
//!
//! | right          | created by           | ends with             |
//! |----------------|----------------------|-----------------------|
//! | `Lease<Write>` | `reserve`            | `publish`, `discard`  |
//! | `Lease<Save>`  | `publish`, `claim`   | `saved`               |
//!
//! A right that is dropped instead is found by the audit, which compares the frames with what the owners
//! hold.

use std::marker::PhantomData;

use crate::cache::frames::FrameIndex;

/// Right to the slot of a frame; see the module.
#[must_use = "a frame stays in use until its right is returned"]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lease<R> {
    frame: FrameIndex,
    right: PhantomData<R>,
}

/// Right of an engine to fill a reserved slot.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Write;

/// Right to make a readable block durable.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Save;

const _: () = assert!(size_of::<Lease<Save>>() == 4, "memory per block of a load is part of the design");

impl<R> Lease<R> {
    /// Creates a right to a frame. The state of the frame shows the right.
    pub(super) fn new(frame: FrameIndex) -> Lease<R> {
        Lease { frame, right: PhantomData }
    }

    /// Returns the frame, to read it.
    pub(crate) fn frame(&self) -> FrameIndex {
        self.frame
    }

    /// Ends the right; the caller changes the state of the frame.
    pub(super) fn end(self) -> FrameIndex {
        self.frame
    }
}
