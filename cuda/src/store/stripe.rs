//! The order of blocks over devices: consecutive blocks start on consecutive devices.

use std::collections::BTreeMap;
use std::collections::VecDeque;

/// Returns an order of extents by which their devices alternate: the indices of `devices`, each once. Devices take turns
/// in the order of `preferred`, then by number. When a device has no extent left, the others continue.
pub fn alternate(devices: &[u32], preferred: &[u32]) -> Vec<usize> {
    let mut by_device: BTreeMap<(usize, u32), VecDeque<usize>> = BTreeMap::new();
    for (index, device) in devices.iter().enumerate() {
        let rank = preferred.iter().position(|one| one == device).unwrap_or(preferred.len());
        by_device.entry((rank, *device)).or_default().push_back(index);
    }
    let mut order = Vec::with_capacity(devices.len());
    while order.len() < devices.len() {
        order.extend(by_device.values_mut().filter_map(VecDeque::pop_front));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_blocks_start_on_consecutive_devices() {
        let devices = [0, 0, 0, 1, 1, 1, 2, 2, 2];
        let order = alternate(&devices, &[]);
        let turns: Vec<u32> = order.iter().map(|index| devices[*index]).collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn preferred_devices_begin_and_a_short_one_ends_earlier() {
        let devices = [0, 0, 0, 5, 7, 7];
        let order = alternate(&devices, &[7, 5]);
        let turns: Vec<u32> = order.iter().map(|index| devices[*index]).collect();
        assert_eq!(turns, [7, 5, 0, 7, 0, 0]);
        let mut each = order.clone();
        each.sort_unstable();
        assert_eq!(each, [0, 1, 2, 3, 4, 5], "each extent once");
    }
}
