//! Weighted round-robin over devices: consecutive blocks get consecutive devices.
//!
//! Each device has a turn, a point on a scale that all devices share. The device with the earliest turn is next, and its
//! turn then moves on by the inverse of its share. So equal shares alternate strictly, and a device with half the share
//! gets every second round. A device that was busy or full continues with the others: it does not catch up, because
//! its blocks would be consecutive.
//!
//! Shares follow free space, so that devices of different sizes fill at the same time. They are coarse: without
//! that, devices that are almost equally full would not alternate.

use crate::effect::DeviceId;
use crate::limits::DEVICES_MAX;

/// Share of the device with the most free space. Devices with at least 31/32 of its free space have the same share.
const SHARE_MAX: u64 = 16;

/// Steps of a turn for one block with a share of one: divisible by all shares.
const STEPS: u64 = 720_720;

const _: () = assert!(STEPS.is_multiple_of(9 * 11 * 13 * 16 * 5 * 7));

/// A device that can take a block, with its share of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) device: DeviceId,
    share: u64,
}

/// Turns of all devices.
#[derive(Debug, Default)]
pub(super) struct Rotation {
    turns: [Turn; DEVICES_MAX],
    /// Latest turn that was taken.
    now: u64,
    /// Number of turns that were taken.
    taken: u64,
}

/// Turn of one device.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    at: u64,
    /// Number of its last turn: of equal turns, the device that waits longest is next.
    last: u64,
}

impl Target {
    /// Divides the blocks of `block_bytes` bytes among devices by their free bytes. A difference of one block does not
    /// count: devices that alternate have it.
    pub(super) fn divide(free: &[(DeviceId, u64)], block_bytes: u64) -> Vec<Target> {
        let most = free.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(1);
        let share = |bytes: u64| {
            let bytes = u128::from(bytes.saturating_add(block_bytes).min(most)) * u128::from(2 * SHARE_MAX);
            // Rounded to the nearest.
            let halves = u64::try_from(bytes / u128::from(most)).expect("at most twice the largest share");
            halves.div_ceil(2).max(1)
        };
        free.iter().map(|(device, bytes)| Target { device: *device, share: share(*bytes) }).collect()
    }
}

impl Rotation {
    /// Returns the device whose turn is next.
    pub(super) fn next(&self, targets: &[Target]) -> Option<Target> {
        let order = |target: &&Target| {
            let turn = self.turns[usize::from(target.device.0)];
            (turn.at.max(self.now), turn.last, target.device)
        };
        targets.iter().min_by_key(order).copied()
    }

    /// Records that a device has got a block.
    pub(super) fn advance(&mut self, target: Target) {
        let turn = &mut self.turns[usize::from(target.device.0)];
        self.now = turn.at.max(self.now);
        self.taken += 1;
        *turn = Turn { at: self.now + STEPS / target.share, last: self.taken };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn targets(free: &[u64]) -> Vec<Target> {
        let free: Vec<_> = (0..).map(DeviceId).zip(free.iter().copied()).collect();
        Target::divide(&free, MIB)
    }

    fn run(rotation: &mut Rotation, targets: &[Target], count: usize) -> Vec<u8> {
        let pick = |_| {
            let target = rotation.next(targets).expect("a target");
            rotation.advance(target);
            target.device.0
        };
        (0..count).map(pick).collect()
    }

    #[test]
    fn equal_devices_alternate() {
        let mut rotation = Rotation::default();
        let equal = targets(&[100 * MIB, 99 * MIB, 100 * MIB]);
        assert_eq!(run(&mut rotation, &equal, 7), [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(run(&mut rotation, &equal, 2), [1, 2], "the next call continues");
    }

    #[test]
    fn devices_get_blocks_by_their_free_space() {
        let blocks = run(&mut Rotation::default(), &targets(&[1000 * MIB, 250 * MIB, 500 * MIB]), 700);
        let of = |device| blocks.iter().filter(|other| **other == device).count();
        assert_eq!((of(0), of(1), of(2)), (400, 100, 200));
        let in_a_row = blocks.chunk_by(|one, next| one == next).map(<[u8]>::len).max();
        assert!(in_a_row <= Some(2), "{in_a_row:?}: the blocks of a device are spread");
    }

    #[test]
    fn almost_full_devices_of_equal_size_alternate() {
        for free in 0..10 {
            let equal = targets(&[free * MIB, (free + 1) * MIB]);
            assert_eq!(equal[0].share, equal[1].share, "{free}");
        }
        assert_eq!(
            targets(&[u64::MAX, u64::MAX / 2]).iter().map(|target| target.share).max(),
            Some(SHARE_MAX)
        );
        assert!(targets(&[]).is_empty());
    }

    #[test]
    fn device_that_returns_does_not_catch_up() {
        let mut rotation = Rotation::default();
        let all = targets(&[MIB, MIB, MIB]);
        assert_eq!(run(&mut rotation, &all[..2], 100)[98..], [0, 1]);
        assert_eq!(run(&mut rotation, &all, 6), [2, 0, 1, 2, 0, 1]);
    }

    #[test]
    fn two_groups_alternate_independently() {
        let mut rotation = Rotation::default();
        let all = targets(&[MIB; 4]);
        let (near, far) = all.split_at(2);
        let mut blocks = (Vec::new(), Vec::new());
        for _ in 0..20 {
            blocks.0.extend(run(&mut rotation, near, 1));
            blocks.1.extend(run(&mut rotation, far, 3));
        }
        for blocks in [blocks.0, blocks.1] {
            assert!(blocks.windows(2).all(|pair| pair[0] != pair[1]), "{blocks:?}");
        }
    }
}
