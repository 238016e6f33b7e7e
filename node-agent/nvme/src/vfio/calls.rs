//! Calls of VFIO (linux/vfio.h) on containers, groups and devices, each wrapped once.
#![expect(unsafe_code, reason = "ioctl(2)")]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_GROUP_FLAGS_VIABLE,
    VFIO_TYPE1v2_IOMMU, vfio_group_status, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
    vfio_region_info,
};

/// Requests: `_IO(';', 100 + n)`.
mod request {
    const fn number(n: libc::Ioctl) -> libc::Ioctl {
        (b';' as libc::Ioctl) << 8 | (100 + n)
    }

    pub(super) const GET_API_VERSION: libc::Ioctl = number(0);
    pub(super) const CHECK_EXTENSION: libc::Ioctl = number(1);
    pub(super) const SET_IOMMU: libc::Ioctl = number(2);
    pub(super) const GROUP_GET_STATUS: libc::Ioctl = number(3);
    pub(super) const GROUP_SET_CONTAINER: libc::Ioctl = number(4);
    pub(super) const GROUP_GET_DEVICE_FD: libc::Ioctl = number(6);
    pub(super) const DEVICE_GET_REGION_INFO: libc::Ioctl = number(8);
    pub(super) const IOMMU_MAP_DMA: libc::Ioctl = number(13);
    pub(super) const IOMMU_UNMAP_DMA: libc::Ioctl = number(14);
}

/// Size and place of a region of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegionPlace {
    /// Size in bytes; 0 if the device does not have the region.
    pub(super) bytes: u64,
    /// Offset in the device's file.
    pub(super) offset: u64,
}

/// Calls ioctl(2).
///
/// # Safety
/// `argument` is what the request expects: a number, or a pointer to its structure that is valid during the call.
unsafe fn call<T>(file: &File, request: libc::Ioctl, argument: T) -> io::Result<libc::c_int> {
    // SAFETY: by the contract of this function; the file is open.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, argument) } {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// Reports whether a container speaks this version of the interface and maps memory with a type 1 IOMMU.
pub(super) fn is_supported(container: &File) -> io::Result<bool> {
    // SAFETY: the request has no argument.
    let version = unsafe { call(container, request::GET_API_VERSION, 0) }?;
    // SAFETY: the argument is a number.
    let type1 = unsafe { call(container, request::CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) }?;
    Ok(version == VFIO_API_VERSION as libc::c_int && type1 == 1)
}

/// Reports whether all functions of a group can be used by this process.
pub(super) fn is_viable(group: &File) -> io::Result<bool> {
    let mut status = vfio_group_status { argsz: size_of::<vfio_group_status>() as u32, flags: 0 };
    // SAFETY: the request fills its structure.
    unsafe { call(group, request::GROUP_GET_STATUS, &raw mut status) }?;
    Ok(status.flags & VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Adds a group to a container.
pub(super) fn join(group: &File, container: &File) -> io::Result<()> {
    let descriptor = container.as_raw_fd();
    // SAFETY: the request reads a descriptor.
    unsafe { call(group, request::GROUP_SET_CONTAINER, &raw const descriptor) }?;
    Ok(())
}

/// Selects the type 1 IOMMU for a container, which must have a group.
pub(super) fn select_type1(container: &File) -> io::Result<()> {
    // SAFETY: the argument is a number.
    unsafe { call(container, request::SET_IOMMU, VFIO_TYPE1v2_IOMMU) }?;
    Ok(())
}

/// Opens a device of a group by its address.
pub(super) fn open_device(group: &File, name: &CStr) -> io::Result<File> {
    // SAFETY: the request reads a text that ends with 0.
    let descriptor = unsafe { call(group, request::GROUP_GET_DEVICE_FD, name.as_ptr()) }?;
    // SAFETY: the request has returned a new descriptor without another owner.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Returns the place of a region: 0 to 5 are BARs.
pub(super) fn region(device: &File, index: u32) -> io::Result<RegionPlace> {
    let argsz = size_of::<vfio_region_info>() as u32;
    let mut info = vfio_region_info { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
    // SAFETY: the request fills its structure; without room for capabilities, it only returns their size.
    unsafe { call(device, request::DEVICE_GET_REGION_INFO, &raw mut info) }?;
    Ok(RegionPlace { bytes: info.size, offset: info.offset })
}

/// Maps memory at an address for the devices of a container. The kernel pins the pages.
///
/// # Safety
/// Devices may read and write the memory until [`unmap`] returns `Ok`: it has no references to plain data, and is not
/// used for anything else before.
pub(super) unsafe fn map(container: &File, address: u64, memory: *mut u8, bytes: u64) -> io::Result<()> {
    let map = vfio_iommu_type1_dma_map {
        argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
        flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: memory.addr() as u64,
        iova: address,
        size: bytes,
    };
    // SAFETY: the request reads its structure; by the contract of this function, devices may access the memory.
    unsafe { call(container, request::IOMMU_MAP_DMA, &raw const map) }?;
    Ok(())
}

/// Ends the access of devices to a range that was mapped.
pub(super) fn unmap(container: &File, address: u64, bytes: u64) -> io::Result<()> {
    let mut range = vfio_iommu_type1_dma_unmap {
        argsz: size_of::<vfio_iommu_type1_dma_unmap>() as u32,
        iova: address,
        size: bytes,
        ..Default::default()
    };
    // SAFETY: the request reads its structure and writes the size that it has unmapped; without flags it has no data.
    unsafe { call(container, request::IOMMU_UNMAP_DMA, &raw mut range) }?;
    if range.size == bytes { Ok(()) } else { Err(io::Error::other(format!("unmapped {} bytes", range.size))) }
}
