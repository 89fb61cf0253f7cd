//! A GPU of this process, and memory on it.

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys::{self, CUcontext};

use super::NcclError;

/// A CUDA device, ready to be used by any thread.
pub(super) struct Device {
    number: usize,
    device: sys::CUdevice,
    context: CUcontext,
}

// SAFETY: a device's primary context may be current in any number of threads, and all that is done with the pointer here
// is to make it current.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Device `number` of those that CUDA shows this process.
    pub fn open(number: usize) -> Result<Self, NcclError> {
        let found = Self::count()?;
        if number >= found {
            return Err(NcclError::NoDevice {
                device: number,
                found,
                visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            });
        }
        let device = driver::device::get(number as c_int).map_err(failed("cuDeviceGet"))?;
        // SAFETY: `device` comes from `device::get`. Released in `drop`.
        let context = unsafe { driver::primary_ctx::retain(device) };
        Ok(Self {
            number,
            device,
            context: context.map_err(failed("cuDevicePrimaryCtxRetain"))?,
        })
    }

    /// How many devices there are.
    pub fn count() -> Result<usize, NcclError> {
        // SAFETY: loading the driver has no effect on what is loaded already.
        if !unsafe { sys::is_culib_present() } {
            return Err(NcclError::NoDriver);
        }
        match driver::init() {
            Ok(()) => {}
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(0),
            Err(error) => return Err(failed("cuInit")(error)),
        }
        let count = driver::device::get_count().map_err(failed("cuDeviceGetCount"))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// What `nvidia-smi -L` calls it.
    pub fn uuid(&self) -> Result<String, NcclError> {
        let uuid = driver::device::get_uuid(self.device).map_err(failed("cuDeviceGetUuid"))?;
        let hex = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8));
        Ok(format!("GPU-{}", hex.collect::<String>()))
    }

    /// Its number.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Makes it the calling thread's device.
    pub fn enter(&self) -> Result<(), NcclError> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { driver::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained in `open`. Whether CUDA is still there to release it does not matter any more.
        let _ = unsafe { driver::primary_ctx::release(self.device) };
    }
}

/// Memory of a device.
pub(super) struct Memory {
    device: Arc<Device>,
    address: sys::CUdeviceptr,
}

impl Memory {
    /// `bytes` bytes, of which nothing is known.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, NcclError> {
        device.enter()?;
        // SAFETY: freed in `drop`, and used through this alone.
        let address = unsafe { driver::malloc_sync(bytes) }.map_err(failed("cuMemAlloc"))?;
        Ok(Self {
            device: device.clone(),
            address,
        })
    }

    /// First byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies from the host; at most as much as there is.
    pub fn write(&self, bytes: &[u8]) -> Result<(), NcclError> {
        self.device.enter()?;
        // SAFETY: the memory lives as long as `self`; CUDA checks its size.
        unsafe { driver::memcpy_htod_sync(self.address, bytes) }.map_err(failed("cuMemcpyHtoD"))
    }

    /// Copies to the host; at most as much as there is.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), NcclError> {
        self.device.enter()?;
        // SAFETY: as above.
        unsafe { driver::memcpy_dtoh_sync(bytes, self.address) }.map_err(failed("cuMemcpyDtoH"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: allocated in `new`, and nobody uses it any more.
            let _ = unsafe { driver::free_sync(self.address) };
        }
    }
}

/// The error of a failed call.
pub(super) fn failed(call: &'static str) -> impl Fn(DriverError) -> NcclError {
    move |error| NcclError::Call {
        call,
        message: error.to_string(),
    }
}
